"""What the loss refuses: one sentence each, that names the sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl

S, T = torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)
IDS, LOGPROBS = torch.tensor([[0, 1]]), torch.tensor([[-1.0, -2.0]])
REFUSED: dict[str, tuple[str, Any]] = {
    "k below 1": ("k=0 .*5", lambda: topk_tail_kl(S, T, k=0)),
    "k above V": ("k=6 .*5", lambda: topk_tail_kl(S, T, k=6)),
    "rows differ": (r"\(2, 3, 5\).*\(2, 2, 5\)", lambda: topk_tail_kl(S, T[:, 1:], k=2)),
    "no teacher": ("neither", lambda: topk_tail_kl(S, k=2)),
    "two teachers": ("both", lambda: topk_tail_kl(S, T, teacher_topk=(IDS, LOGPROBS), k=2)),
    "label above V": ("id 5.* 5 ids", lambda: topk_tail_kl(S, T, k=2, labels=torch.full((2, 3), 5))),
    "label below 0": ("id -1.* 5 ids", lambda: topk_tail_kl(S, T, k=2, labels=torch.full((2, 3), -1))),
    "label shape": (r"\(6,\).*\(2, 3\)", lambda: topk_tail_kl(S, T, k=2, labels=torch.zeros(6).long())),
    "label dtype": ("int64.*float32", lambda: topk_tail_kl(S, T, k=2, labels=torch.zeros(2, 3))),
    "weight shape": (r"token_weight.*\(2,\)", lambda: topk_tail_kl(S, T, k=2, token_weight=torch.ones(2))),
    "margin without labels": ("labels", lambda: topk_tail_kl(S, T, k=2, privilege_weight=torch.ones(2, 3))),
    "divergence": ("'kl'.*reverse_kl", lambda: topk_tail_kl(S, T, k=2, divergence="kl")),
    "tail": ("'none'.*bucket", lambda: topk_tail_kl(S, T, k=2, tail="none")),
    "support": ("'both'.*teacher", lambda: topk_tail_kl(S, T, k=2, support="both")),
    "beta": ("beta=1", lambda: topk_tail_kl(S, T, k=2, divergence="jsd", beta=1)),
    "temperature": ("temperature=0", lambda: topk_tail_kl(S, T, k=2, temperature=0)),
    "backend": ("'cuda'.*torch", lambda: topk_tail_kl(S, T, k=2, backend="cuda")),
    "integer logits": ("floating", lambda: topk_tail_kl(S.long(), T.long(), k=2)),
    "num_items 0": ("num_items=0.*6 rows", lambda: topk_tail_kl(S, T, k=2, num_items=0)),
    "num_items of a batch": (r"num_items.*\(2,\)", lambda: topk_tail_kl(S, T, k=2, num_items=torch.ones(2))),
    "served id above V": ("id 5.* 5 ids", lambda: topk_tail_kl(S[0, :1], teacher_topk=(IDS + 4, LOGPROBS))),
    "served twice": ("twice", lambda: topk_tail_kl(S[0, :1], teacher_topk=(IDS * 0, LOGPROBS))),
    "served logits": ("above 0", lambda: topk_tail_kl(S[0, :1], teacher_topk=(IDS, -LOGPROBS))),
    "served shapes": (r"\(1, 2\).*\(2, 'k'\)", lambda: topk_tail_kl(S[0, :2], teacher_topk=(IDS, LOGPROBS))),
    "served student support": (
        "support='student'",
        lambda: topk_tail_kl(S[0, :1], teacher_topk=(IDS, LOGPROBS), support="student"),
    ),
    "served margin": (
        "lacks it in 1 of 1",
        lambda: topk_tail_kl(
            S[0, :1],
            teacher_topk=(IDS, LOGPROBS),
            labels=torch.tensor([4]),
            privilege_weight=torch.ones(1),
        ),
    ),
    "hidden size": (r"4.*\(7, 3\)", lambda: fused_linear_topk_tail_kl(S[..., :4], torch.ones(7, 3), T)),
    "tied head size": (r"5.*\(7, 4\)", lambda: fused_linear_topk_tail_kl(S[..., :4], torch.ones(7, 4), T)),
    "hidden rows": (
        r"\(2, 3\).*\(2, 2\)",
        lambda: fused_linear_topk_tail_kl(S, torch.ones(7, 5), T[:, 1:]),
    ),
    "bias size": (
        r"\(6,\).*7",
        lambda: fused_linear_topk_tail_kl(S, torch.ones(7, 5), T, student_bias=torch.ones(6)),
    ),
    "tied head, own bias": (
        "tied",
        lambda: fused_linear_topk_tail_kl(S, torch.ones(7, 5), T, teacher_bias=torch.ones(7)),
    ),
    "chunk": ("chunk_size=0", lambda: fused_linear_topk_tail_kl(S, torch.ones(7, 5), T, chunk_size=0, k=2)),
    "soft-cap": (
        "logit_softcap=0",
        lambda: fused_linear_topk_tail_kl(S, torch.ones(7, 5), T, logit_softcap=0, k=2),
    ),
}


@pytest.mark.parametrize("case", REFUSED.keys())
def test_refused_with_a_sentence(case: str) -> None:
    pattern, call = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=pattern) as error:
        call()
    assert "\n" not in str(error.value)


def test_head_widths_that_differ() -> None:
    with pytest.raises(ValueError, match=r"151936.*152064"):
        topk_tail_kl(torch.zeros(1, 151_936), torch.zeros(1, 152_064))
    with pytest.raises(ValueError, match=r"36.*64"):
        fused_linear_topk_tail_kl(torch.zeros(1, 4), torch.ones(36, 4), torch.zeros(1, 4), torch.ones(64, 4))


def test_sharded_or_empty_weight() -> None:
    hidden = torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"student_weight is empty, shape \(0,\)"):
        fused_linear_topk_tail_kl(hidden, torch.empty(0), hidden)
    with pytest.raises(ValueError, match=r"teacher_weight is empty, shape \(0, 4\)"):
        fused_linear_topk_tail_kl(hidden, torch.randn(7, 4), hidden, torch.empty(0, 4))
    with pytest.raises(ValueError, match=r"\(2, 0\).*empty"):
        topk_tail_kl(torch.empty(2, 0), torch.empty(2, 0))


def test_dtensor_is_refused_by_name(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.randn(7, 4), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"student_weight is a DTensor of shape \(7, 4\).*process_group"):
            fused_linear_topk_tail_kl(torch.randn(2, 4), weight, torch.randn(2, 4))
    finally:
        dist.destroy_process_group()
