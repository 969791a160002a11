"""What one process of a vocabulary-parallel group checks; a module, so that spawned processes can import it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ops.oracle import peaked, relative_error
from torch import Tensor

from lopd_fast import TopKTailKL, fused_linear, fused_linear_topk_tail_kl, loss_torch, topk_tail_kl

ROWS, WIDTH, HIDDEN = 9, 10, 6
TOLERANCE = 2e-6


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def same_outputs(got: TopKTailKL, want: TopKTailKL, what: str) -> None:
    check(torch.equal(got.topk_ids, want.topk_ids), f"{what}: topk_ids {got.topk_ids} {want.topk_ids}")
    for name in (
        "loss",
        "kl",
        "privilege",
        "student_logprob",
        "teacher_logprob",
        "student_mass",
        "teacher_mass",
    ):
        a, b = getattr(got, name), getattr(want, name)
        check((a is None) == (b is None), f"{what}: {name}")
        if a is not None:
            check(torch.allclose(a, b, rtol=1e-5, atol=2e-6, equal_nan=True), f"{what}: {name} {a} {b}")


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def check_logits(
    group: Any, columns: slice, options: dict[str, Any], what: str, coarse: bool = False
) -> None:
    student, teacher = peaked(ROWS, WIDTH, seed=1).float(), peaked(ROWS, WIDTH, seed=2).float()
    if options.pop("deep", False):  # a tail of e^-120, none of it in some shards
        student, teacher = (x.index_fill(1, torch.tensor([0, 1, 2, 3]), 120.0) for x in (student, teacher))
        student[:, 4:9], teacher[:, 4:9] = -torch.inf, -torch.inf
    if coarse:  # ties at rank k, on both sides of a boundary between shards
        student, teacher = student.div(8).round(), teacher.div(8).round()
    full, shard = (leaf(student), leaf(teacher)), (leaf(student[:, columns]), leaf(teacher[:, columns]))
    served = options.pop("served", None)
    if served is not None:
        options = dict(options, teacher_topk=served)
    want = topk_tail_kl(full[0], None if served else full[1], **options)
    got = topk_tail_kl(shard[0], None if served else shard[1], process_group=group, **options)
    same_outputs(got, want, what)
    for out in (got, want):
        (1.5 * out.loss + out.kl.square().sum()).backward()
    for name, part, whole in zip(("student", "teacher"), shard, full, strict=True):
        if whole.grad is None:
            check(part.grad is None, f"{what}: {name}")
            continue
        check(relative_error(part.grad, whole.grad[:, columns]) < TOLERANCE, f"{what}: gradient of {name}")


def check_fused(group: Any, columns: slice, tied: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    what = f"fused, tied={tied}, {dtype}"
    generator = torch.Generator().manual_seed(3)
    x = {
        "student_hidden": torch.randn(ROWS, HIDDEN, generator=generator),
        "teacher_hidden": torch.randn(ROWS, HIDDEN, generator=generator),
        "student_weight": 2 * torch.randn(WIDTH, HIDDEN, generator=generator),
        "student_bias": torch.randn(WIDTH, generator=generator),
    }
    if not tied:
        x["teacher_weight"] = 2 * torch.randn(WIDTH, HIDDEN, generator=generator)
    full: Any = {name: leaf(value.to(dtype)) for name, value in x.items()}
    local = {name: value if "hidden" in name else value[columns] for name, value in x.items()}
    shard: Any = {name: leaf(value.to(dtype)) for name, value in local.items()}
    want = fused_linear_topk_tail_kl(**full, chunk_size=4, **options)
    got = fused_linear_topk_tail_kl(**shard, chunk_size=4, process_group=group, **options)
    same_outputs(got, want, what)
    (1.5 * got.loss).backward()
    (1.5 * want.loss).backward()
    for name, part in shard.items():
        whole = full[name].grad if "hidden" in name else full[name].grad[columns]
        error = relative_error(part.grad, whole)
        check(error < (1e-5 if dtype == torch.float32 else 6e-3), f"{what}: gradient of {name}, {error:.1e}")


def run(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pair: Any = dist.new_group([0, 1])
    everyone: Any = dist.group.WORLD
    for group, widths in ((pair, [6, 4]), (everyone, [3, 6, 1])):
        if group is pair and rank > 1:
            continue
        first = sum(widths[: dist.get_rank(group)])
        columns = slice(first, first + widths[dist.get_rank(group)])
        labels = torch.tensor([0, 5, 6, 9, -100, 3, 2, 8, 7])
        weight = torch.rand(ROWS, generator=torch.Generator().manual_seed(4))
        rows: dict[str, Any] = dict(labels=labels, token_weight=weight, privilege_weight=weight - 0.5)
        for k in (1, 4, 9, 10):
            for support in ("teacher", "student"):
                check_logits(
                    group, columns, dict(k=k, support=support, **rows), f"{widths}, k={k}, {support}"
                )
            check_logits(group, columns, dict(k=k), f"{widths}, k={k}, ties", coarse=True)
        for tail in ("renormalize", "drop"):
            options = dict(k=3, divergence="jsd", beta=0.3, tail=tail, temperature=0.7, **rows)
            check_logits(group, columns, options, f"{widths}, jsd, {tail}")
        check_logits(group, columns, dict(k=4, deep=True), f"{widths}, deep tail")
        ids = torch.tensor([[9, 0, 6], [5, -1, 1], [-1, -1, -1]]).repeat(3, 1)
        logprobs = torch.tensor([[-1.0, -2.0, -3.0]]).repeat(9, 1)
        check_logits(
            group, columns, dict(served=(ids, logprobs), divergence="forward_kl"), f"{widths}, served"
        )
        for tied in (True, False):
            check_fused(group, columns, tied, torch.float32, dict(k=3, logit_softcap=4.0, **rows))
            check_fused(group, columns, tied, torch.bfloat16, dict(k=3, **rows))
        check_fused(group, columns, True, torch.float32, dict(k=3, labels=torch.full((ROWS,), -100)))
        chunks_that_a_budget_sizes(group, columns)
        refuses_global_ids_out_of_range(group, columns)
    dist.destroy_process_group()


def chunks_that_a_budget_sizes(group: Any, columns: slice) -> None:
    """Every process cuts the same chunks, whatever the width of its shard: 12 rows of 6 columns, 18 of 4."""
    student, weight = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(5)).split([40, WIDTH])
    teacher = student.roll(1, 0)
    logits = [x @ weight.T for x in (student, teacher)]
    budgets = fused_linear.LEAST_CHUNK_BYTES, loss_torch.SCRATCH_BYTES
    fused_linear.LEAST_CHUNK_BYTES, loss_torch.SCRATCH_BYTES = 1, {"cpu": 288}
    try:
        same_outputs(
            fused_linear_topk_tail_kl(student, weight[columns], teacher, k=3, process_group=group),
            fused_linear_topk_tail_kl(student, weight, teacher, k=3),
            "fused, chunks sized by a budget",
        )
        same_outputs(
            topk_tail_kl(*(x[:, columns] for x in logits), k=3, process_group=group),
            topk_tail_kl(*logits, k=3),
            "logits, chunks sized by a budget",
        )
    finally:
        fused_linear.LEAST_CHUNK_BYTES, loss_torch.SCRATCH_BYTES = budgets


def refuses_global_ids_out_of_range(group: Any, columns: slice) -> None:
    logits = torch.randn(2, WIDTH)[:, columns]
    for arguments, named in ((dict(labels=torch.tensor([0, WIDTH])), "10"), (dict(k=WIDTH + 1), "k=11")):
        try:
            topk_tail_kl(logits, logits, process_group=group, **{"k": 2, **arguments})
        except ValueError as error:
            check(named in str(error), str(error))
        else:
            raise AssertionError(f"{arguments} was let through")
