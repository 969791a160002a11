"""One step of TRL's trainers with the fused loss: every mode, every kind of head, precision, and what is never held."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import tiny
import torch
from ops.memory import LargestTensor
from torch import Tensor
from trl_trainers import (
    ALL,
    LORA,
    DistillationTrainer,
    GKDTrainer,
    Make,
    assert_same_step,
    distillation,
    gkd,
    loss_and_gradients,
    one_batch,
    scaled,
    sdft,
    sdpo,
)

from lopd_fast import fused_linear
from lopd_fast.integrations.trl import full_vocabulary, use_fused_loss
from lopd_fast.integrations.trl.methods import CHUNKED_LOSS, exchanged

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def operand(x: Tensor) -> Tensor:
    """What a matrix product takes of a tensor, in fp64."""
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return x.to(low).double()


def exact_divergence(
    student: Tensor,
    teacher: Tensor,
    head: Tensor,
    teacher_head: Tensor,
    mask: Tensor,
    beta: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's `_chunked_divergence_loss` in fp64, without its entropy."""
    z, u = operand(student) @ operand(head).T, operand(teacher) @ operand(teacher_head).T
    per_id = GKDTrainer.generalized_jsd_loss(
        z, u.detach(), beta=beta, temperature=options["temperature"], reduction="none"
    )
    return (per_id.sum(-1) * mask).sum() / options["num_items_in_batch"], torch.zeros(()), mask.sum()


@contextmanager
def exact_loss(trainer: Any) -> Iterator[None]:
    """Within, a trainer's own loss in fp64 from the very hidden states and weights that its heads multiply."""
    heads = {model.get_output_embeddings() for model in (trainer.model, trainer.teacher_model)}
    with ExitStack() as stack:
        if isinstance(trainer, DistillationTrainer):
            stack.enter_context(
                exchanged(sys.modules[DistillationTrainer.__module__], CHUNKED_LOSS, exact_divergence)
            )
        for head in heads:
            head.forward = lambda hidden, head=head: operand(hidden) @ operand(head.weight).T
            stack.callback(delattr, head, "forward")
        yield


def distance(step: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all gradients, relative."""
    names = [name for name in exact if name != "loss"]
    error, size = (
        torch.cat([x[name].double().flatten() for name in names])
        for x in ({n: step[n].double() - exact[n] for n in names}, exact)
    )
    return float(error.norm() / size.norm())


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", ALL)
def test_as_near_to_fp64_as_the_trainers_own(make: Make, half: bool, tmp_path: Any):
    """Of the same hidden states. The usual logits are rounded to bf16, which makes ties at rank k as well."""
    student = tiny.model(dtype=torch.bfloat16) if half and make is distillation else None  # knows no autocast
    trainer = make(tmp_path, 1, False, student, bf16=half)
    trainer.accelerator.prepare_model(trainer.model)  # as training does: puts autocast around its forward
    batch = one_batch(trainer)
    with exact_loss(trainer):
        exact = loss_and_gradients(trainer, batch)
    usual = loss_and_gradients(trainer, batch)
    with use_fused_loss(trainer):
        fused = loss_and_gradients(trainer, batch)
    assert exact["loss"].dtype == torch.float64
    # Our arithmetic is fp32 whatever the head's precision; the usual loss of SDPO is 2e-2 off here under autocast.
    assert abs(fused["loss"] / exact["loss"] - 1) < 1e-6
    off = distance(fused, exact)
    assert off < 1.5 * distance(usual, exact)
    assert off < (3 * 2**-8 if half else 2e-6)  # what is left is the backbone's: a few units of its precision


@pytest.mark.parametrize("make", [sdft, sdpo])
def test_every_mode_of_self_distillation(make: Make, tmp_path: Any):
    """Two passes over the same rollouts, so that the second is weighted by importance ratios."""
    trainer = make(tmp_path, 1, False, num_iterations=2, distillation_is_clip=1.5)
    batch = one_batch(trainer)
    with use_fused_loss(trainer):
        fields = [batch[f"{side}_{what}"] for side in ("prompt", "completion") for what in ("ids", "mask")]
        logps = trainer._compute_rollout_logps(*fields)
    # But for the first row of SDFT's, which is masked once TRL has these.
    torch.testing.assert_close(logps[1:], batch["old_per_token_logps"][1:], atol=1e-5, rtol=1e-5)
    batch["old_per_token_logps"] = logps - torch.randn(logps.shape)
    for trainer.args.distillation_alpha in (0.0, 0.3, 1.0):
        for trainer.args.distillation_mode in ("topk_logits", "full_logits"):
            for trainer.args.distillation_add_tail in (False, True):
                assert_same_step(trainer, batch)


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite"])
def test_scaled_and_capped_logits(kind: str, tmp_path: Any):
    """The teacher has neither: each side is read from its own config."""
    trainer = gkd(tmp_path, 1, False, student=scaled(kind))
    assert_same_step(trainer, one_batch(trainer), num_items_in_batch=torch.tensor(17))


def test_scaled_logits_of_both_sides(tmp_path: Any):
    trainer = sdft(tmp_path, 1, False, student=scaled("Gemma2"), distillation_alpha=1.0, temperature=0.7)
    assert_same_step(trainer, one_batch(trainer))


def test_head_trained_through_modules_to_save(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LORA, "modules_to_save", ["lm_head"])
    trainer = sdft(tmp_path, 1, True, distillation_add_tail=True)
    batch = one_batch(trainer)
    with torch.no_grad():  # away from the teacher's, which is the original
        trainer.model.get_output_embeddings().weight.add_(0.1)
    assert_same_step(trainer, batch)
    trained = [
        name for name, p in trainer.model.named_parameters() if "lm_head" in name and p.grad is not None
    ]
    assert len(trained) == 1, trained


def test_liger_model(tmp_path: Any):
    """Liger's forward, as use_liger_kernel installs it, calls the head where there are no labels."""
    liger = pytest.importorskip("liger_kernel.transformers")
    student = tiny.model()
    kernels = dict.fromkeys(["rope", "rms_norm", "swiglu", "cross_entropy"], False)  # they need a GPU
    liger.apply_liger_kernel_to_llama(**kernels, fused_linear_cross_entropy=True, model=student)
    assert "liger" in student.forward.__func__.__module__
    trainer = gkd(tmp_path, 1, False, student=student)
    assert_same_step(trainer, one_batch(trainer))


def test_evaluation_with_metrics_gets_logits(tmp_path: Any):
    trainer = gkd(tmp_path, 1, False)
    batch = one_batch(trainer)
    with torch.no_grad(), use_fused_loss(trainer):
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        torch.testing.assert_close(loss, trainer.compute_loss(trainer.model, batch))
    assert outputs.logits.shape[-1] == tiny.VOCABULARY


@pytest.mark.parametrize("make", [distillation, sdft, gkd])
def test_no_logits_exist(make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """With chunks of one row, no tensor but the head's gradient is as large as logits would be."""
    monkeypatch.setattr(tiny, "VOCABULARY", 4096)
    for module in (fused_linear, full_vocabulary):
        monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 1)
    trainer = make(tmp_path, 1, False)
    batch = one_batch(trainer)
    mask = batch["completion_mask"] if "completion_mask" in batch else batch["labels"] != -100
    logits = int(mask.sum()) * 4096 * 4
    largest = []
    for step in (lambda _: nullcontext(), use_fused_loss):
        with step(trainer), LargestTensor(ignore=(4096, 32, torch.float32)) as watched:
            loss_and_gradients(trainer, batch)
        largest.append(watched.bytes)
    if make is not distillation:  # TRL's own holds tiles of 32,768 ids
        assert largest[0] >= logits
    assert largest[1] < logits
