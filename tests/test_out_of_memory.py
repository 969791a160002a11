"""Memory that runs out: one sentence that names sizes and what to lower, and a step that can be taken again."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from test_cold_start import stage_of
from torch import Tensor

from lopd_fast import cold_start, fused_linear, trainer
from lopd_fast.composer import Composer
from lopd_fast.errors import UserError
from lopd_fast.losses import fused_linear_topk_tail_kl
from lopd_fast.memory_advice import learning_advice
from lopd_fast.monitors import Monitors
from lopd_fast.out_of_memory import is_out_of_memory
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.student import Student
from lopd_fast.trainer import Trainer

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."


def fails(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def test_what_counts_as_out_of_memory():
    with pytest.raises(RuntimeError) as of_cpu:
        torch.empty(1 << 60)
    assert is_out_of_memory(of_cpu.value)
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA)) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(CUDA), RuntimeError("can't allocate memory"), MemoryError()]
)
def test_the_fused_loss_names_its_sizes(error: Exception, monkeypatch: pytest.MonkeyPatch):
    """Of the rows that count, 6 of 8; by the same class, so that who catches it still does."""
    hidden, weight = torch.randn(8, 4), torch.randn(1234, 4)
    weights = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1])
    monkeypatch.setattr(fused_linear, "chunk_of", lambda options: fails(error))
    with pytest.raises(type(error)) as found:
        fused_linear_topk_tail_kl(hidden, weight, torch.randn(8, 4), token_weight=weights, chunk_size=5)
    assert type(found.value) is type(error) and found.value.__cause__ is error
    text = str(found.value)
    assert (
        "6 rows, a vocabulary of 1,234 and 5 rows to a chunk: give chunk_size" in text and str(error) in text
    )
    other = RuntimeError("another fault")
    monkeypatch.setattr(fused_linear, "chunk_of", lambda options: fails(other))
    with pytest.raises(RuntimeError) as found:
        fused_linear_topk_tail_kl(hidden, weight, torch.randn(8, 4))
    assert found.value is other


LEARNING = (
    r"\(a micro-batch of 2 rollouts, \d+ rows, vocabulary 288\): lower train.micro_batch_tokens \(now 8,192\), or set "
    "model.gradient_checkpointing=true, then go on with --resume; what was saved is whole.$"
)
PLACES: dict[str, tuple[Any, str, str]] = {
    "rollout": (
        HFRollout,
        "rollouts",
        r"\(up to 32 rows at once, vocabulary 288\): lower rollout.batch_size \(now 32\)",
    ),
    "monitors": (Monitors, "read", "lower train.micro_batch_tokens or rollout.batch_size"),
    "compose": (Composer, "forward", LEARNING),
    "teacher": (trainer, "teacher_hidden", LEARNING),
    "student": (Student, "hidden", LEARNING),
    "loss": (trainer, "fused_linear_topk_tail_kl", LEARNING),
    "backward": (Tensor, "backward", LEARNING),
}


@pytest.mark.parametrize("phase", PLACES)
def test_a_step_that_has_too_little_memory_can_be_taken_again(phase: str, monkeypatch: pytest.MonkeyPatch):
    """In its second micro-batch, where gradients of the first are held; what is tried again is the step that it was."""
    words = [
        "train.tasks_per_step=4",
        "retrieval.grow=false",
        "monitor.gap_every=0",
        "monitor.reward_every=0",
    ]

    def made() -> Trainer:
        parts = tiny.parts(*words)
        tiny.stir([tensor for _, tensor in parts.student.trainable()])
        parts.composer.freeze_anchor()
        made = Trainer(parts, parts.environment.tasks("train", 4, 0), say=lambda line: None)
        monkeypatch.setattr(made, "_micro_batches", lambda rollouts: [rollouts[:2], rollouts[2:]])
        return made

    whole, tried = made(), made()
    expected = whole.run_step()
    owner, name, words_of_it = PLACES[phase]
    inner, calls = getattr(owner, name), 0

    def second_fails(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 or phase in ("rollout", "monitors", "compose"):
            raise torch.OutOfMemoryError(CUDA)
        return inner(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, second_fails)
        with pytest.raises(UserError, match=f"^Out of memory in {phase} of step 1.*{words_of_it}") as found:
            tried.run_step()
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
    assert tried.step == 0
    again = tried.run_step()
    assert (again.loss, again.student_grad_norm) == (expected.loss, expected.student_grad_norm)
    theirs = tiny.learning(whole.parts)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tiny.learning(tried.parts).items())


def test_the_optimizers_and_other_faults(monkeypatch: pytest.MonkeyPatch):
    parts = tiny.parts()
    parts.composer.freeze_anchor()
    stage = Trainer(parts, parts.environment.tasks("train", 4, 0), say=lambda line: None)
    monkeypatch.setattr(trainer, "optimizer_step", fails(torch.OutOfMemoryError(CUDA)))
    with pytest.raises(UserError, match="in optimizers of step 1: set .* optim.kind=adamw8bit in a new run"):
        stage.run_step()
    monkeypatch.setattr(trainer, "optimizer_step", fails(RuntimeError("another fault")))
    with pytest.raises(RuntimeError, match="^another fault$"):
        stage.run_step()


def test_cold_start(monkeypatch: pytest.MonkeyPatch):
    parts = tiny.parts()
    rollouts = [tiny.rollout(number, [1, 1, 0, 1], 1.0) for number in range(3)]
    stage = stage_of(parts, rollouts)
    with monkeypatch.context() as patched:
        patched.setattr(cold_start, "linear_nll", fails(torch.OutOfMemoryError(CUDA)))
        told = r"in cold-start step 1 \(a micro-batch of 3 rollouts, 9 rows, vocabulary 288\): lower train.micro_batch"
        with pytest.raises(UserError, match=told):
            stage.run_step()
    with monkeypatch.context() as patched:
        patched.setattr(cold_start, "optimizer_step", fails(torch.OutOfMemoryError(CUDA)))
        with pytest.raises(UserError, match="the optimizer of cold-start step 1: set cold_start.optim.kind="):
            stage.run_step()
    assert all(tensor.grad is None for tensor in stage.parameters)
    assert not stage.run_step().skipped


def test_what_is_lowered_already_is_not_named():
    backbone = tiny.parts("model.gradient_checkpointing=true").backbone
    alone = str(learning_advice("backward of step 1", [tiny.rollout(1, [1, 1], 1.0)], backbone, 8192))
    assert "1 rollout, 2 rows" in alone and "micro_batch_tokens" not in alone and "checkpointing" not in alone
    assert "lower rollout.max_tokens in a new run" in alone
