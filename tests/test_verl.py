"""verl's loss modes, called as verl calls them: restated always, and verl's own modules where it is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import verl_restated
from ops.oracle import expected, peaked, relative_error
from torch import Tensor

from lopd_fast.integrations import verl as ours

WIDTH, TOPK = 40, 4
PROMPTS, RESPONSES = [2, 3], [4, 2]  # tokens of two sequences


@pytest.fixture(params=["restated", "installed"])
def verl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """verl's losses module, with our modes registered."""
    if request.param == "restated":
        module = verl_restated.install(monkeypatch)
    else:
        pytest.importorskip("verl")
        module = importlib.import_module("verl.trainer.distillation.losses")
        monkeypatch.setattr(module, "DISTILLATION_LOSS_REGISTRY", dict(module.DISTILLATION_LOSS_REGISTRY))
        monkeypatch.setattr(
            module, "DISTILLATION_SETTINGS_REGISTRY", dict(module.DISTILLATION_SETTINGS_REGISTRY)
        )
        monkeypatch.setattr(module, "compute_topk_loss", module.compute_topk_loss)
    ours.register()
    yield module


def configs(mode: str, strategy: str = "fsdp", clamp: float | None = None) -> tuple[Any, Any]:
    loss = SimpleNamespace(
        loss_mode=mode,
        loss_max_clamp=clamp,
        use_task_rewards=False,
        use_policy_gradient=False,
        topk=TOPK,
        global_batch_info={},
    )
    actor = SimpleNamespace(
        strategy=strategy, loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None
    )
    return actor, SimpleNamespace(distillation_loss=loss)


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(teacher: list[Tensor], **extra: Any) -> dict[str, Any]:
    """verl's tensors: int32 ids, and a list of zeros at each last token, for which the server has none."""
    ids, logprobs = [], []
    for logits in teacher:
        best = logits.log_softmax(-1).float().topk(TOPK)
        best.indices[-1], best.values[-1] = 0, 0.0
        ids.append(best.indices.int())
        logprobs.append(best.values)
    longest_prompt, longest = max(PROMPTS), max(RESPONSES)
    prompt_mask = torch.tensor([[0] * (longest_prompt - n) + [1] * n for n in PROMPTS])
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in RESPONSES])
    return {
        "teacher_ids": nested(ids),
        "teacher_logprobs": nested(logprobs),
        "prompts": torch.zeros(len(PROMPTS), longest_prompt).long(),
        "responses": torch.zeros(len(RESPONSES), longest).long(),
        "attention_mask": torch.cat([prompt_mask, mask], dim=1),
        "response_mask": mask,
        "dp_size": 1,
        "batch_num_tokens": sum(RESPONSES),
        "global_batch_size": len(PROMPTS),
        "distillation_only": True,
        **extra,
    }


def sequences(seed: int) -> list[Tensor]:
    return [
        peaked(p + r, WIDTH, seed=seed + i, scale=1.5)
        for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]


def response_rows(x: list[Tensor]) -> Tensor:
    """Rows that predict the response."""
    return torch.cat([seq[p - 1 : -1] for seq, p in zip(x, PROMPTS, strict=True)])


def as_nested(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    return {name: nested(list(value[0].split(lengths))) for name, value in outputs.items()}


def wanted(divergence: str) -> tuple[Any, list[Tensor]]:
    """The token mean over the response, and its gradient per sequence, in fp64."""
    leaves = [x.requires_grad_() for x in sequences(1)]
    want = expected(response_rows(leaves), response_rows(sequences(11)), k=TOPK, divergence=divergence)
    return want, list(torch.autograd.grad(want.loss, leaves))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("strategy", ["fsdp", "veomni"])
def test_packed_logits_to_loss(verl: Any, divergence: str, strategy: str) -> None:
    """Processor, nested outputs, final loss, backward: the oracle's numbers over the response, nothing elsewhere."""
    config, distillation = configs(f"{divergence}_topk_tail", strategy)
    data = micro_batch(sequences(11))
    logits = torch.cat(sequences(1)).float()[None].requires_grad_()
    outputs = verl.distillation_ppo_loss(config, distillation, data=data, student_logits=logits)
    assert all(value.shape == logits.shape[:2] for value in outputs.values())
    loss, metrics = verl.distillation_ppo_loss(
        config, distillation, model_output=as_nested(outputs), data=data
    )
    loss.backward()
    want, gradients = wanted(divergence)
    assert loss.item() == pytest.approx(want.loss.item(), rel=1e-4)
    assert logits.grad is not None
    assert relative_error(logits.grad[0], torch.cat(gradients)) < 1e-4
    outside = torch.cat(gradients).abs().sum(-1) == 0
    assert not logits.grad[0, outside].any()
    assert metrics["distillation/teacher_mass"] == pytest.approx(want.teacher_mass.mean().item(), rel=1e-5)
    assert metrics["distillation/student_mass"] == pytest.approx(want.student_mass.mean().item(), rel=1e-5)


def test_settings_say_topk_and_other_modes_stay_verls(verl: Any) -> None:
    for mode in ours.DIVERGENCES:
        assert verl.DISTILLATION_SETTINGS_REGISTRY[mode].use_topk
    once = verl.compute_topk_loss
    ours.register()
    assert verl.compute_topk_loss is once, "registered twice"
    config, distillation = configs("forward_kl_topk")
    distillation.distillation_loss.log_prob_min_clamp = None
    logits = torch.cat(sequences(1)).float()[None]
    outputs = verl.distillation_ppo_loss(
        config, distillation, data=micro_batch(sequences(11)), student_logits=logits
    )
    assert "distillation_losses" in outputs and ours.LOSSES not in outputs


class Overwrites(torch.autograd.Function):
    """A fused cross entropy: backward writes its gradient over the logits, which autograd does not notice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.logits = logits
        return logits.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        with torch.no_grad():
            ctx.logits.data.fill_(3.0)
        return torch.zeros_like(ctx.logits)


def test_policy_loss_may_overwrite_the_logits(verl: Any) -> None:
    config, distillation = configs("reverse_kl_topk_tail")
    data = micro_batch(sequences(11), distillation_only=False)
    leaf = torch.cat(sequences(1)).float()[None].requires_grad_()
    logits = leaf * 1.0
    outputs = verl.distillation_ppo_loss(config, distillation, data=data, student_logits=logits)
    policy = Overwrites.apply(logits)
    loss, _ = verl.distillation_ppo_loss(config, distillation, model_output=as_nested(outputs), data=data)
    (loss + policy).backward()
    _, gradients = wanted("reverse_kl")
    assert leaf.grad is not None
    assert relative_error(leaf.grad[0], torch.cat(gradients)) < 1e-4


@pytest.fixture
def restated(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = verl_restated.install(monkeypatch)
    ours.register()
    return module


def test_sequence_parallel_rows_are_sliced_like_the_logits(restated: Any) -> None:
    """11 tokens on 2 ranks: 6 and 5 with one of padding, whose loss is 0."""
    config, distillation = configs("reverse_kl_topk_tail")
    data = micro_batch(sequences(11))
    logits = torch.cat(sequences(1)).float()[None]
    whole = ours.token_losses(config, distillation, data, logits, "thd")[ours.LOSSES]
    padded = torch.nn.functional.pad(logits, (0, 0, 0, 1))
    parts = []
    for rank in range(2):
        restated.ranks.ulysses = (rank, 2)
        parts.append(
            ours.token_losses(config, distillation, data, padded.chunk(2, 1)[rank], "thd")[ours.LOSSES]
        )
    together = torch.cat(parts, dim=1)
    assert together[0, -1] == 0
    assert torch.equal(together[:, :-1], whole)


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
def test_megatron_layouts(restated: Any, data_format: str) -> None:
    """One rank: each sequence's losses are those of the packed path, padding is 0."""
    data = micro_batch(sequences(11))
    packed = torch.cat(sequences(1)).float()[None]
    config, distillation = configs("forward_kl_topk_tail")
    want = as_nested(ours.token_losses(config, distillation, data, packed, "thd"))[ours.LOSSES]
    config.strategy = "megatron"
    logits = packed
    if data_format == "bshd":
        logits = nested([x.float() for x in sequences(1)]).to_padded_tensor(0.0)
    got = ours.token_losses(config, distillation, data, logits, data_format)[ours.LOSSES]
    if data_format == "bshd":
        assert not got[1, -1].any()
        got = torch.cat([row[: p + r] for row, p, r in zip(got, PROMPTS, RESPONSES, strict=True)])[None]
    assert torch.allclose(got[0], want.values(), rtol=1e-6, atol=1e-7)


def test_refusals(restated: Any) -> None:
    data = micro_batch(sequences(11))
    logits = torch.cat(sequences(1)).float()[None]
    config, distillation = configs("reverse_kl_topk_tail", "torchtitan")
    with pytest.raises(ValueError, match="'torchtitan'.*fsdp, fsdp2, veomni or megatron"):
        restated.compute_topk_loss(config, distillation, data, logits, "thd")
    config.strategy = "fsdp"
    with pytest.raises(ValueError, match=r"\(1, 11\) tokens and student_logits \(1, 10\)"):
        restated.compute_topk_loss(config, distillation, data, logits[:, 1:], "thd")
    fused = {"distillation_losses": nested([torch.zeros(6), torch.zeros(5)])}
    with pytest.raises(ValueError, match="reverse_kl_topk_tail.*use_fused_kernels=False"):
        restated.distillation_ppo_loss(config, distillation, model_output=fused, data=data)


def test_a_verl_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    verl_restated.install(monkeypatch)
    for name in ("verl.trainer.distillation", "verl.trainer.distillation.losses"):
        old: Any = ModuleType(name)
        old.losses = old
        monkeypatch.setitem(sys.modules, name, old)
    with pytest.raises(ImportError, match="verl>=0.9"):
        ours.register()


def test_importing_the_plugin_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = verl_restated.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "lopd_fast.integrations.verl_plugin", raising=False)
    assert set(module.DISTILLATION_LOSS_REGISTRY) == {"forward_kl_topk"}
    importlib.import_module("lopd_fast.integrations.verl_plugin")
    assert set(ours.DIVERGENCES) < set(module.DISTILLATION_LOSS_REGISTRY)
