"""A run split over processes: equal to that of one, resumed by another number of them, stopped once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import resume_in_processes
import tiny
import torch
import torch.distributed as dist
from step_in_processes import CASES, MORE
from torch.multiprocessing.spawn import spawn

from lopd_fast.errors import UserError
from lopd_fast.metrics import read_metrics
from lopd_fast.processes import World, start
from lopd_fast.render import Renderer
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.rollout.sampling import NucleusOfTopK, OwnDraws, Sampling

HERE = Path(__file__).resolve().parent


def together(size: int, folder: Path, cases: Iterable[str], modes: list[str]) -> None:
    spawn(resume_in_processes.run, args=(size, str(folder), list(cases), modes), nprocs=size, join=True)


def test_two_processes_step_as_one_and_either_resumes_the_other(tmp_path: Path):
    together(2, tmp_path, CASES, ["lora"])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "modes"), [(2, ["full"]), (3, [])])
def test_more_of_them(size: int, modes: list[str], tmp_path: Path):
    together(size, tmp_path, [*CASES, *MORE], modes)


CONFIG = """
model: {path: MODEL, device: cpu, dtype: float32, shard: true}
student: {mode: full}
composer: {num_queries: 3, depth: 2, ff_mult: 2, lora: {rank: 2}}
environment: {name: "tiny:ParityEnvironment", train_tasks: 4, heldout_tasks: 3}
explore: {seeds: 3, tasks: 2}
cold_start: {steps: 1}
rollout: {max_new_tokens: 4, max_tokens: 512}
train: {tasks_per_step: 3, steps: 500, checkpoint_every: 1000, out: OUT}
"""


def train(processes: int, *words: str) -> subprocess.Popen[str]:
    """`lopd-fast train` under torchrun, or by itself for one process."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
    launch = [*launch, "--rdzv-endpoint", "localhost:0"] if processes > 1 else []
    command = [sys.executable, *launch, "-m", "lopd_fast.cli", "train", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_once_and_one_process_goes_on(tmp_path: Path):
    out, config = tmp_path / "run", tmp_path / "run.yaml"
    model = tiny.save_model(tmp_path / "model")
    config.write_text(CONFIG.replace("MODEL", str(model)).replace("OUT", str(out)))
    running = train(2, "--config", str(config))
    while running.poll() is None and not (out / "metrics.jsonl").is_file():
        time.sleep(0.2)
    time.sleep(2)
    running.send_signal(signal.SIGTERM)
    printed, complained = running.communicate(timeout=120)
    assert printed.count("Stopped and saved") == 1, printed + complained
    assert complained.count("stopping after this step") == 1, complained
    steps = len(read_metrics(out / "metrics.jsonl"))
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-000001", f"step-{steps + 1:06d}"], names
    assert printed.count("explore: the base's own successes (") == 1, printed  # one process talks

    words = ["--config", str(config), "--resume", f"train.steps={steps + 1}"]
    going_on = train(1, *words)
    printed, complained = going_on.communicate(timeout=300)
    assert going_on.returncode == 0, printed + complained
    assert "saved by 2 processes and goes on in 1" in " ".join(printed.split())
    assert len(read_metrics(out / "metrics.jsonl")) == steps + 1 and (out / "summary.json").is_file()


@pytest.mark.slow
def test_what_ends_a_run_is_said_once(tmp_path: Path):
    for words, message in (
        (
            ["model.path=/nowhere", "model.device=cpu", "environment.name=lookup"],
            "There is no model at /nowhere",
        ),
        (["model.pat=x"], "Unknown key 'model.pat'"),
    ):
        running = train(2, *words)
        printed, complained = running.communicate(timeout=120)
        assert running.returncode and complained.count(message) == 1, printed + complained


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"4 processes were launched here for 2 GPUs.*--nproc-per-node 2"):
        start("auto")
    with pytest.raises(UserError, match="model.device=cuda:0 puts 4 processes on one GPU; leave it at auto"):
        start("cuda:0")
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name != "gloo")
    with pytest.raises(UserError, match="4 processes were launched, but this torch has no gloo"):
        start("cpu")


def test_shares_are_runs_of_about_equal_length():
    lengths = [5, 1, 1, 1, 8, 2]
    shares = [World(rank, 3).share(lengths) for rank in range(3)]
    assert shares == [[0, 1], [2, 3], [4, 5]]
    assert World(0, 2).share([7]) + World(1, 2).share([7]) == [0] and World(0, 2).share([]) == []
    assert World(0, 1).share([0, 0]) == [0, 1]


def test_an_episode_of_its_own_seed_does_not_depend_on_the_batch():
    """Alone, among others, in another order: the same ids; another seed: other ids."""
    tasks = tiny.ParityEnvironment().tasks("train", 6, 0)
    sampling = Sampling(1.0, 0.95, 20)

    def ids(engine: HFRollout, order: list[int], shift: int = 0) -> dict[int, list[int]]:
        found = engine.rollouts(
            tiny.model(),
            tiny.ParityEnvironment(2),
            [tasks[index] for index in order],
            sampling,
            seed=0,
            seeds=[index + shift for index in order],
        )
        return {index: rollout.response_ids for index, rollout in zip(order, found, strict=True)}

    one, two = (
        HFRollout(Renderer(tiny.tokenizer()), tiny.config(f"rollout.batch_size={n}").rollout) for n in (6, 2)
    )
    all_at_once = ids(one, [0, 1, 2, 3, 4, 5])
    assert ids(two, [5, 3, 1, 0, 2, 4]) == all_at_once and ids(one, [2]) == {2: all_at_once[2]}
    assert len(set(map(tuple, all_at_once.values()))) == 6
    assert ids(one, [0, 1, 2, 3, 4, 5], shift=9) != all_at_once


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 1.0), (0, 0.8)])
def test_own_draws_have_the_probabilities_of_the_policy(top_k: int, top_p: float):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    rows = 20_000
    sampling = Sampling(0.7, top_p, top_k)
    expected = NucleusOfTopK(sampling)(torch.zeros(1, 1), logits[None])[0].softmax(-1)
    processor = NucleusOfTopK(sampling, OwnDraws([(seed, 3) for seed in range(rows)], torch.device("cpu")))
    for _ in range(2):  # the next token's draws are new ones
        drawn = processor(torch.zeros(1, 1), logits.expand(rows, -1)).argmax(-1)
        found = torch.bincount(drawn, minlength=5) / rows
        assert (found - expected).abs().max() < 4 * 0.5 / rows**0.5
    again = OwnDraws([(7, 3), (7, 4)], torch.device("cpu"))
    ids = torch.arange(5)[None]
    first, second = again.next(ids), again.next(ids)
    assert torch.equal(first[1], second[0]) and not torch.equal(first[0], second[0])
