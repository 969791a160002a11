"""The main job on real parts, made short: a real language model, a real embedding model, FAISS, SQL run by SQLite."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lopd_fast.bank import ExperienceBank
from lopd_fast.cli import app
from lopd_fast.metrics import read_metrics

SHORT = [
    "explore.tasks=0",
    "explore.seeds=4",
    "cold_start.steps=1",
    "cold_start.batch_size=2",
    "train.steps=2",
    "train.tasks_per_step=2",
    "train.checkpoint_every=1",
    "environment.heldout_tasks=2",
    "rollout.max_new_tokens=8",
    "loss.first_share=0.5",
]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("runs") / "demo"
    result = CliRunner().invoke(app, ["demo", "--out", str(out), *SHORT])
    assert result.exit_code == 0, result.output
    return out, result.output


def test_summary_holds_every_promised_number(demo_run: tuple[Path, str]) -> None:
    summary = json.loads((demo_run[0] / "summary.json").read_text())
    for name in ("pass_rate_before", "pass_rate_after", "pass_rate_teacher_right", "pass_rate_teacher_wrong"):
        assert 0.0 <= summary[name] <= 1.0
    assert summary["heldout_tasks"] == 2
    assert summary["seconds"] > 0
    assert summary["kl_pos_neg"] >= 0
    assert summary["seed_demonstrations"] == 4
    assert summary["divergence"] == "forward_kl for 1 steps, then reverse_kl"


def test_output_shows_table_samples_and_the_next_command(demo_run: tuple[Path, str]) -> None:
    out, text = demo_run
    assert "student after" in text
    assert "before:" in text and "after:" in text
    assert f"lopd-fast bank search {out / 'bank'}" in text.strip().splitlines()[-1]


def test_metrics_and_plot_cover_the_steps(demo_run: tuple[Path, str]) -> None:
    out, _ = demo_run
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["divergence"] for line in lines] == ["forward_kl", "reverse_kl"]
    assert all(line["tokens"] > 0 and line["kl"] >= 0 and line["student_grad_norm"] > 0 for line in lines)
    assert (out / "curves.png").stat().st_size > 10_000
    assert list((out / "tensorboard").iterdir())


def test_grown_bank_loads_and_holds_the_seeds(demo_run: tuple[Path, str]) -> None:
    bank = ExperienceBank.load(demo_run[0] / "bank")
    assert [item.source for item in bank.experiences].count("seed") == 4


def test_student_folder_loads_without_this_package(demo_run: tuple[Path, str]) -> None:
    student = demo_run[0] / "student"
    program = (
        "import sys; sys.modules['lopd_fast'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(student)!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(student)!r})\n"
        "ids = tokenizer('SELECT', return_tensors='pt').input_ids\n"
        "print(model(ids).logits.shape[-1], model.lm_head.weight is model.model.embed_tokens.weight)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["49152", "True"], done.stderr


def test_student_differs_from_the_base(demo_run: tuple[Path, str]) -> None:
    from lopd_fast.demo.smollm import smollm_folder

    ids = AutoTokenizer.from_pretrained(smollm_folder())("SELECT city FROM", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(smollm_folder(), dtype=torch.float32)(ids).logits
    student = AutoModelForCausalLM.from_pretrained(demo_run[0] / "student", dtype=torch.float32)(ids).logits
    assert not torch.allclose(base, student)


def test_a_finished_folder_is_not_overwritten(demo_run: tuple[Path, str]) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(demo_run[0]), *SHORT])
    assert result.exit_code == 2
    assert "--resume" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "train.stpes=3"], "did you mean 'train.steps'"),
        (["train", "environment.name=lookup"], "No model is named"),
        (["train", "environment.name=lookup", "model.path=/nowhere"], "There is no model at /nowhere"),
        (["train", "environment.name=loockup"], "did you mean 'lookup'"),
        (["train", "--config", "/nowhere.yaml"], "There is no config file"),
        (["ablate", "--variants", "nothing"], "There is no variant"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert expected in result.output
    assert result.output.count("\n") == 1


@pytest.mark.slow
def test_ablation_trains_each_variant_and_prints_one_table(tmp_path: Path) -> None:
    words = [
        "ablate",
        "--out",
        str(tmp_path),
        "--variants",
        "no latents,frozen composer,shuffled retrieval",
        *SHORT,
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "ablation.json").read_text())
    assert set(rows) == {"no latents", "frozen composer", "shuffled retrieval"}
    assert all(row[0]["kl"] >= 0 for row in rows.values())
    starts = {
        name: (tmp_path / f"{name.replace(' ', '-')}-0" / "cold_start" / "metrics.jsonl").read_text()
        for name in rows
    }
    assert starts["no latents"] == starts["frozen composer"]  # to the second: one cold start, copied
    assert starts["no latents"] != starts["shuffled retrieval"]
