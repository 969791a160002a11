"""The plan: what the ledger counts, that a real step holds what was planned, and what is said of a run too large."""

import gc
import json
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from transformers import PretrainedConfig, Qwen3Config
from typer.testing import CliRunner

from lopd_fast.cli import app
from lopd_fast.plan import make
from lopd_fast.plan.devices import Device
from lopd_fast.plan.ledger import Ledger
from lopd_fast.plan.load import Load, load_of
from lopd_fast.plan.make import advice, make_plan, refuse_too_large
from lopd_fast.plan.probe import META, Probe
from lopd_fast.scratch import release_scratch

LOAD = Load(
    tokens=60,
    response=40,
    rollouts=2,
    micro_batches=2,
    sampled=2,
    batches=2,
    turn=30,
    experiences=2,
    latents=6,
    memory=20,
)


def model() -> PretrainedConfig:
    """A small Qwen3."""
    return Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )


def no_time(*_: Any) -> float:
    return 0.0


def cpu(free: float) -> Device:
    return Device("a CPU", free, 1e11, 1e11, 1e10, cuda=False)


def test_ledger_counts_storages_by_part_and_phase_and_not_views() -> None:
    weight = torch.ones(100, 10)
    ledger = Ledger(torch.device("cpu"), ("rest", "weights"), no_time)
    with ledger:
        ledger.name([weight], "weights")
        with ledger.phase("forward"):
            x = torch.zeros(5, 10)  # 200 bytes
            y = x.t().reshape(50)[:35].view(5, 7) @ torch.ones(7, 7)  # 200 while copied, then 196 and 140
            del x
        with ledger.phase("later"):
            y.mul_(2)
    assert ledger.phases["forward"].parts == {"rest": 200 + 200 + 196 + 140, "weights": 4000}
    assert ledger.phases["forward"].flops == 2 * 5 * 7 * 7
    assert ledger.live == {"rest": 140, "weights": 4000}
    assert ledger.phases["later"].peak == 4140


def test_known_integers_answer_as_they_would_and_unknown_numbers_do_not_stop_a_run() -> None:
    with Ledger(META, ("rest",), no_time):
        mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool().to(META)
        lengths = mask.sum(1)
        assert lengths.tolist() == [3, 1] and not bool(mask.all()) and bool(mask[0].all())
        assert mask.nonzero().shape == (4, 2)
        assert torch.zeros(2, 3, 5, device=META)[mask].shape == (4, 5)
        lengths[1:].copy_(torch.randn(1, 9, device=META).argmax(-1))  # nobody knows these
        assert lengths.nonzero().shape == (2, 1)
        assert float(torch.randn(3, device=META).sum()) == 1.0


@pytest.mark.parametrize("words", [["model.gradient_checkpointing=true"], ["student.mode=full"]])
def test_a_real_step_holds_what_was_planned(words: list[str]) -> None:
    """Against the replayed log of torch's own allocator, which knows nothing of the ledger."""
    config, load = tiny.config(*words), LOAD
    planned = Probe(config, model(), torch.float32, no_time, cuda=False)
    before = sum(planned.ledger.live.values())
    phases = planned.sample(load) | planned.cold_start(load) | planned.step(load)
    peaks = {name: phase.peak for name, phase in phases.items()}
    names = [
        "prefill",
        "decode",
        "cold start",
        "compose",
        "teacher",
        "student",
        "loss",
        "backward",
        "optimizers",
    ]
    assert list(peaks) == names
    real = Probe(config, model(), torch.float32, no_time, cuda=False, device=torch.device("cpu"))
    counted = real.sample(load) | real.cold_start(load) | real.step(load)
    for name, peak in peaks.items():
        assert peak == pytest.approx(counted[name].peak, rel=0.02), name
    real.step(load)  # what is made once is made
    release_scratch()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as log:
        real.step(load)
    events: Any = log.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    events = sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()
    )
    grown = int(torch.tensor([event.nbytes() for event in events]).cumsum(0).max())
    assert before + grown == pytest.approx(max(peaks[name] for name in names[3:]), rel=0.15)


@pytest.mark.parametrize("kind", ["adamw8bit", "paged_adamw8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_the_state_of_8_bit_adamw_is_counted(kind: str) -> None:
    def state(kind: str, device: torch.device) -> int:
        config = tiny.config("student.mode=full", f"optim.kind={kind}")
        probe = Probe(config, model(), torch.float32, no_time, cuda=False, device=device)
        return probe.ledger.live["optimiser"]

    cpu = torch.device("cpu")
    assert state(kind, META) == state(kind, cpu) < 0.9 * state("adamw", cpu)


def test_a_half_precision_step_holds_what_was_planned_without_autocast() -> None:
    """The meta device knows no autocast: mixed products there give the input's dtype, as autocast does on a device."""
    config = tiny.config("model.gradient_checkpointing=true", "rollout.merge_lora=false")
    planned, real = (
        Probe(config, model(), torch.bfloat16, no_time, cuda=False, **place)
        for place in ({}, {"device": torch.device("cpu")})
    )
    peaks, counted = (probe.sample(LOAD) | probe.step(LOAD) for probe in (planned, real))
    for name, phase in peaks.items():
        assert phase.peak == pytest.approx(counted[name].peak, rel=0.02), name


def test_offloaded_checkpoints_are_not_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopd_fast.activation_offload.LEAST_BYTES", 1)
    load = replace(LOAD, tokens=400, response=380)
    peaks = []
    for offload in ("false", "true"):
        words = ["model.gradient_checkpointing=true", f"model.activation_offload={offload}"]
        probe = Probe(tiny.config(*words), model(), torch.bfloat16, no_time, cuda=True)
        peaks.append(probe.step(load)["loss"].peak)
    kept = 2 * 2 * load.rollouts * 32 * 2 * load.tokens  # teacher and student, layers, width, bytes
    assert kept < peaks[0] - peaks[1] < 2 * kept  # and what the last norm keeps
    with pytest.raises(ValueError, match="this run is on a CPU"):
        Probe(tiny.config(*words), model(), torch.float32, no_time, cuda=False)


def test_limits_are_where_a_plan_stops_fitting() -> None:
    config = tiny.config("model.gradient_checkpointing=true")
    plan = make_plan(config, LOAD, model(), cpu(8e6), torch.float32)
    assert plan.fits and plan.longest_rollout > LOAD.tokens
    longest = plan.longest_rollout
    full = Load(**vars(LOAD) | dict(tokens=longest, response=longest - 20, turn=longest - 30))
    at_limit = make_plan(config, full, model(), cpu(8e6), torch.float32, brief=True)
    assert at_limit.peak == pytest.approx(0.9 * 8e6, rel=0.15)


def test_load_is_the_longest_rollout_in_every_row() -> None:
    config = tiny.config("rollout.max_tokens=1000", "train.micro_batch_tokens=2500", "rollout.batch_size=2")
    load = load_of(config)  # 2 experiences x 3 queries; 3 tasks
    assert (load.tokens, load.response, load.latents, load.turn) == (1000, 993, 6, 6)
    assert (load.rollouts, load.micro_batches, load.sampled, load.batches) == (2, 2, 2, 2)
    assert load.memory == 1000
    assert load_of(tiny.config("objective.use_latents=false")).latents == 0
    with pytest.raises(ValueError, match="max_tokens=90 leaves no room"):
        load_of(tiny.config("rollout.max_tokens=90", "composer.num_queries=60"))


def test_a_run_that_cannot_fit_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config()
    said = advice(make_plan(config, LOAD, model(), cpu(1.5e6), torch.float32))
    assert said.startswith("This run does not fit: ") and said.count(". ") == 0
    for words in ("vocabulary of 300", "rollouts of 60 tokens", "model.gradient_checkpointing=true"):
        assert words in said
    monkeypatch.setattr(make, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(make, "this_device", lambda _: cpu(1.5e6))
    monkeypatch.setattr(make, "model_of", lambda _: model())
    with pytest.raises(ValueError, match="This run does not fit"):
        refuse_too_large(config)
    monkeypatch.setattr(make, "this_device", lambda _: cpu(1e12))
    refuse_too_large(config)


def test_plan_prints_json_and_its_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopd_fast.plan.models.named_model", lambda _: model())
    words = [
        "plan",
        "--model",
        "small",
        "--gpu",
        "h100-80gb",
        "--json",
        *tiny.SMALL,
        "rollout.max_tokens=100",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert plan["fits"] and plan["usable_bytes"] == 72e9
    cache = 2 * 2 * 2 * 8 * 2 * 3 * 100  # layers, keys and values, heads, width, bytes, rollouts, tokens
    # At the peak a layer may hold keys that are already copied and not yet the cache's.
    assert 0.7 * cache <= plan["phases"]["decode"]["parts"]["KV cache"] <= cache


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "qwen3-9b"], "There is no model shape 'qwen3-9b'"),
        (["--model", "smollm2", "--gpu", "h1000"], "There is no GPU 'h1000'"),
        (["--gpu", "h100-80gb"], "No model is named"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 2 and expected in result.output and result.output.count("\n") == 1
