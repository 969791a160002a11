"""Five steps of TRL's trainers on a tiny model, with their own loss and with the fused one; and what is refused."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
from trl_trainers import (
    ALL,
    Make,
    SDFTTrainer,
    SDPOTrainer,
    assert_same_training,
    distillation,
    gkd,
    sdft,
    sdpo,
)

from lopd_fast.integrations.trl import use_fused_loss
from lopd_fast.integrations.trl.heads import head_input

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

# Every trainer with every accumulation, full and PEFT, each with other weights of the divergence and tails.
GRID = [(1, False, 0.0, True), (4, False, 0.5, False), (1, True, 1.0, False), (4, True, 0.3, True)]


def options_of(make: Make, accumulation: int, peft: bool, weight: float, tail: bool) -> dict[str, Any]:
    by_trainer: dict[str, Any] = {"distillation_alpha": weight, "distillation_add_tail": tail}
    if make in (distillation, gkd):
        by_trainer = {"beta": weight}
    return {"accumulation": accumulation, "peft": peft} | by_trainer


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("case", GRID, ids=["full", "full-accumulated", "peft", "peft-accumulated"])
def test_five_steps(make: Make, case: tuple[int, bool, float, bool], tmp_path: Any):
    """Of sequences of unequal length, some with nothing to learn; accumulated, a whole micro-batch of them."""
    run = assert_same_training(make, tmp_path, **options_of(make, *case))
    assert len({tokens for batch in run.micro_batches for tokens in batch if tokens}) > 1
    assert any(0 in batch for batch in run.micro_batches)
    if case[0] == 4:
        assert any(batch == [0] for batch in run.micro_batches)


ADAM = {"optim": "adamw_torch_fused", "learning_rate": 5e-5}  # transformers' defaults
LONG = {"learning_rate": 1e-3, "adam_epsilon": 1e-5}


@pytest.mark.parametrize("make", ALL)
def test_five_steps_of_adam(make: Make, tmp_path: Any):
    """Its first update is lr g / (|g| + 1e-8): the rounding of a g as small as that is in it, divided by 1e-8."""
    assert_same_training(make, tmp_path, **options_of(make, *GRID[1]), **ADAM)


@pytest.mark.slow
@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("case", GRID)
def test_long_steps_of_adam(make: Make, case: tuple[int, bool, float, bool], tmp_path: Any):
    """Twenty times the default rate, so its epsilon stands above the gradients' rounding (7e-7 at norm 1)."""
    assert_same_training(make, tmp_path, **options_of(make, *case), **ADAM | LONG)


@pytest.mark.slow
@pytest.mark.parametrize("make", [sdpo, sdft])
@pytest.mark.parametrize("kind", ["base", "ema"])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "peft"])
def test_every_kind_of_teacher(make: Make, kind: str, peft: bool, tmp_path: Any):
    """A copy of the student, or an adapter of it, that moves with it or not; loaded from a folder, as TRL does."""

    def from_folder(folder: Any, **options: Any) -> Any:
        return make(
            folder, student=str(tiny.save_model(tmp_path / "model")), teacher_model_kind=kind, **options
        )

    assert_same_training(from_folder, tmp_path / "out", accumulation=4, peft=peft)


@pytest.mark.slow
@pytest.mark.parametrize("make", [sdpo, sdft])
def test_two_updates_for_each_rollout(make: Make, tmp_path: Any):
    assert_same_training(make, tmp_path, accumulation=1, peft=False, num_iterations=2)


@pytest.mark.slow
def test_on_policy_gkd(tmp_path: Any):
    assert_same_training(gkd, tmp_path, accumulation=1, peft=False, lmbda=1.0)


EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distillation", "gkd", "sdft", "sdpo"])
def test_example(name: str):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"trl_{name}.py", "--tokens", "8", "--vocabulary", "300"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    usual, fused = ([float(x) for x in pair] for pair in re.findall(r"losses (\S+)  (\S+)", done.stdout))
    assert fused == pytest.approx(usual, abs=2e-4), done.stdout
    assert "memory ratio" in done.stdout


# Tokens of a step, and GiB: twice as many take GKD's own loss, which keeps some 20 tensors of logits, 26 GiB.
LARGE = [("distillation", 2048, 5), ("sdpo", 2048, 8), ("sdft", 2048, 8), ("gkd", 1024, 15)]


@pytest.mark.slow
@pytest.mark.parametrize("name, tokens, needed", LARGE)
def test_peak_memory_of_a_large_vocabulary(name: str, tokens: int, needed: float):
    """A step with 151,936 ids: at most a third of what the trainer takes by itself."""
    if psutil.virtual_memory().available < needed * 2**30:
        pytest.skip(f"the trainer's own loss needs {needed} GiB")
    command = [sys.executable, EXAMPLES / f"trl_{name}.py", "--steps", "1", "--tokens", str(tokens // 8)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    ratio = re.search(r"memory ratio ([\d.]+)", done.stdout)
    assert ratio is not None and float(ratio[1]) >= 3, done.stdout


def test_undo_gives_back_the_trainers_own(tmp_path: Any):
    trainer = sdft(tmp_path, 1, False)
    before = dict(vars(trainer))
    handle = use_fused_loss(trainer)
    assert trainer._forward_logits.__func__ is not SDFTTrainer._forward_logits
    with pytest.raises(ValueError, match="_forward_logits is replaced already"):
        use_fused_loss(trainer)
    handle.undo()
    handle.undo()
    assert vars(trainer) == before
    head = trainer.model.get_output_embeddings()
    with pytest.raises(RuntimeError, match="in the middle"), use_fused_loss(trainer):
        head_input(trainer.model, "student", lambda: (_ for _ in ()).throw(RuntimeError("in the middle")))
    assert vars(trainer) == before and "forward" not in vars(head)


REFUSED = [
    ({"distillation_mode": "sampled_token"}, "'sampled_token' is no divergence"),
    ({"distillation_weight": 0.5}, "distillation_weight=0.5 mixes in a policy loss"),
    ({"distillation_topk": None}, "needs distillation_topk"),
    ({"torch_compile": True}, "torch_compile"),
    ({"_n_gpu": 2}, "DataParallel"),
]


def test_refuses_what_it_cannot_do_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    trainer = sdpo(tmp_path, 1, False)
    for changes, message in REFUSED:
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(trainer.args, name, value)
            with pytest.raises(ValueError, match=message):
                use_fused_loss(trainer)
    for name, value, message in (
        ("use_teacher_server", True, "takes its teacher from a server"),
        ("teacher_model", None, "has no teacher_model"),
        ("is_fsdp_enabled", True, "FSDP shards"),
        (
            "__class__",
            type("Own", (SDPOTrainer,), {"_forward_logits": print}),
            "Own has a _forward_logits of its own",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, name, value)
            with pytest.raises(ValueError, match=message):
                use_fused_loss(trainer)
    with pytest.raises(TypeError, match="not object"):
        use_fused_loss(object())
    from trl.trainer.sft_trainer import SFTTrainer

    with pytest.raises(TypeError, match="not SFTTrainer"):
        use_fused_loss(SFTTrainer.__new__(SFTTrainer))
