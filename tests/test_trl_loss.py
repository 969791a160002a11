"""The parts of the fused loss for TRL's trainers by themselves."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl_trainers import GKDTrainer, scaled

from lopd_fast.fused_head import Projection
from lopd_fast.integrations.trl import full_vocabulary
from lopd_fast.integrations.trl.full_vocabulary import full_divergence, label_logprobs
from lopd_fast.integrations.trl.heads import HeadInput, check_head
from lopd_fast.integrations.trl.methods import divergence_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_refuses_heads_that_are_more_than_a_weight():
    adapted = get_peft_model(tiny.model(tie=False), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="the student's output head carries a PEFT adapter"):
        check_head(adapted, "student")
    plain = tiny.model(tie=False)
    check_head(plain, "student")
    assert "forward" not in vars(plain.lm_head)
    for weight, message in (
        (torch.zeros(0, 32), "with 0 numbers"),
        (torch.zeros(288, 32, device="meta"), "on meta"),
        (torch.zeros(288, 32, dtype=torch.uint8), "of torch.uint8"),
    ):
        plain.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(ValueError, match=message):
            check_head(plain, "teacher")
    plain.lm_head = nn.Sequential(nn.Identity(), nn.Identity())
    with pytest.raises(ValueError, match="is a Sequential"):
        check_head(plain, "student")
    odd = scaled("Cohere")
    odd.config.logit_scale = 0.5  # the model keeps the one that it was made with
    with pytest.raises(ValueError, match=r"scale 0\.5 and soft-cap None"):
        check_head(odd, "student")


def test_refuses_a_sharded_head(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny.model(tie=False)
        fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"the teacher's output head is sharded \(a DTensor\)"):
            check_head(model, "teacher")
    finally:
        dist.destroy_process_group()


def random_side(rows: int, width: int, projection: Projection, bias: bool) -> HeadInput:
    hidden = torch.randn(2, rows // 2, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(37, width, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(37, dtype=torch.float64, requires_grad=True) if bias else None
    return HeadInput(hidden, weight, offset, projection)


def logits_of(side: HeadInput, temperature: float) -> Tensor:
    z = nn.functional.linear(side.hidden, side.weight, side.bias) * side.projection.logit_scale
    cap = side.projection.logit_softcap
    return (z if cap is None else cap * torch.tanh(z / cap)) / temperature


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_full_divergence_is_that_of_all_logits(beta: float, monkeypatch: pytest.MonkeyPatch):
    """Against GKD's formula in fp64, in chunks of three rows; the sides differ in width, scale, cap and bias."""
    monkeypatch.setitem(full_vocabulary.CHUNK_BYTES, "cpu", 2 * 3 * 37 * 8)
    monkeypatch.setitem(full_vocabulary.SCRATCH_BYTES, "cpu", 2 * 14 * 37 * 8)
    student = random_side(10, 5, Projection(0.7, 4.0), bias=True)
    teacher = random_side(10, 3, Projection(1.0, None), bias=False)
    weight = torch.rand(2, 5, dtype=torch.float64)
    weight[0, 1:4] = 0
    result = full_divergence(
        student, teacher, token_weight=weight, divergence=divergence_of(beta), beta=beta, temperature=1.5
    )
    z, u = logits_of(student, 1.5), logits_of(teacher, 1.5).detach()
    per_id = GKDTrainer.generalized_jsd_loss(z, u, beta=beta, reduction="none")
    expected = (weight * per_id.sum(-1)).sum()
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.kl, per_id.sum(-1).detach() * (weight > 0))
    entropy = torch.distributions.Categorical(logits=z.detach()).entropy() * (weight > 0)
    torch.testing.assert_close(result.entropy, entropy)
    inputs = [student.hidden, student.weight, student.bias]
    for name, got, want in zip(
        ("hidden", "weight", "bias"),
        torch.autograd.grad((result.loss * 3).tanh(), inputs, retain_graph=True),
        torch.autograd.grad((expected * 3).tanh(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{n}: {m}")
    assert teacher.weight.grad is None
    labels = torch.randint(37, (2, 5))
    logps = z.detach().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    torch.testing.assert_close(label_logprobs(student, labels, 1.5), logps)


def test_full_divergence_of_no_rows_and_of_equal_sides():
    student = random_side(6, 5, Projection(1.0, None), bias=False)
    call: dict[str, Any] = dict(divergence="reverse_kl", beta=1.0)
    nothing = full_divergence(student, student, token_weight=torch.zeros(2, 3), **call)
    assert nothing.loss == 0
    for gradient in torch.autograd.grad(nothing.loss, [student.hidden, student.weight]):
        assert gradient.count_nonzero() == 0
    equal = full_divergence(student, student, token_weight=torch.ones(2, 3), **call)
    assert equal.loss.abs() < 1e-12
    assert torch.autograd.grad(equal.loss, student.hidden)[0].abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"rows \(2, 3\)"):
        full_divergence(student, student, token_weight=torch.ones(2, 4), **call)
    other = random_side(6, 5, Projection(1.0, None), bias=False)
    other = HeadInput(other.hidden, other.weight[:30], None, other.projection)
    with pytest.raises(ValueError, match="37 ids and the teacher's 30"):
        full_divergence(student, other, token_weight=torch.ones(2, 3), **call)
