"""What one process of a group checks of sharded heads and shared batches; a module, so that spawned ones import it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verl_restated
from ops.oracle import peaked
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl
from lopd_fast.integrations import verl as verl_modes

ROWS, WIDTH, HIDDEN = 5, 10, 6
CLOSE: dict[str, Any] = dict(atol=1e-6, rtol=0)


class Student(nn.Module):
    """A body and a head, whose loss is computed from hidden states outside."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the teacher's hidden states and its head."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(n, HIDDEN, generator=generator) for n in (ROWS, ROWS, WIDTH))  # pyright: ignore


def student_loss(hidden: Tensor, weight: Tensor, part: slice, **options: Any) -> Tensor:
    _, teacher_hidden, teacher_weight = batch()
    return fused_linear_topk_tail_kl(
        hidden, weight, teacher_hidden[part], teacher_weight, k=3, **options
    ).loss


def one_process() -> dict[str, Tensor]:
    """Gradients of the mean over all rows."""
    model = Student()
    student_loss(model(batch()[0]), model.head.weight, slice(None)).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def same_gradients(model: nn.Module, what: str) -> None:
    wanted = one_process()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{what}: no gradient of {name}"
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        name = name.removeprefix("module.")
        torch.testing.assert_close(grad, wanted[name], **CLOSE, msg=lambda text: f"{what}: {name}: {text}")  # noqa: B023


def shards_equal_the_whole(group: Any, widths: list[int]) -> None:
    """Values and gradients to 1e-6 in fp32, from logits and from hidden states, both KLs."""
    first = sum(widths[: dist.get_rank(group)])
    columns = slice(first, first + widths[dist.get_rank(group)])
    hidden, teacher_hidden, teacher_weight = batch()
    weight = Student().head.weight.detach()
    labels = torch.tensor([0, 9, 5, -100, 3])
    for divergence in ("reverse_kl", "forward_kl"):
        options: Any = dict(k=4, labels=labels, privilege_weight=torch.ones(ROWS), divergence=divergence)
        whole = [x.clone().requires_grad_() for x in (hidden, weight, teacher_hidden, teacher_weight)]
        local = [
            x.clone().requires_grad_()
            for x in (hidden, weight[columns], teacher_hidden, teacher_weight[columns])
        ]
        want = fused_linear_topk_tail_kl(*whole, **options)
        got = fused_linear_topk_tail_kl(*local, process_group=group, **options)
        from_logits = topk_tail_kl(
            (whole[0] @ whole[1].T)[:, columns].detach(),
            (whole[2] @ whole[3].T)[:, columns].detach(),
            process_group=group,
            **options,
        )
        for out in (got, from_logits):
            for name in ("loss", "kl", "privilege", "student_mass", "teacher_mass"):
                torch.testing.assert_close(getattr(out, name), getattr(want, name), **CLOSE)
            assert torch.equal(out.topk_ids, want.topk_ids)
        grads = torch.autograd.grad(got.loss, local)
        wanted = torch.autograd.grad(want.loss, whole)
        for i, (a, b) in enumerate(zip(grads, wanted, strict=True)):
            torch.testing.assert_close(a, b[columns] if i % 2 else b, **CLOSE)


def tensor_parallel_head(group: Any) -> None:
    """A DTensor head is refused by name; its local shard and the group give the whole loss and a DTensor gradient."""
    model = Student()
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(model.head, mesh, ColwiseParallel())
    weight: Any = model.head.weight
    hidden, teacher_hidden, teacher_weight = batch()
    with pytest.raises(TypeError, match=r"student_weight is a DTensor of shape \(10, 6\).*unshard.*to_local"):
        fused_linear_topk_tail_kl(hidden, weight, teacher_hidden)
    local = weight.to_local()
    widths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(widths, torch.tensor([len(local)]), group=group)
    columns = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(widths).cumsum(0)]).tolist()
    rank = dist.get_rank(group)
    loss = fused_linear_topk_tail_kl(
        model(hidden),
        local,
        teacher_hidden,
        teacher_weight[columns[rank] : columns[rank + 1]],
        k=3,
        process_group=group,
    ).loss
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    same_gradients(model, "tensor-parallel head")


def ranks_with_1_and_4_tokens(group: Any) -> None:
    """The mean over all rows, however they are spread: num_items is the global count over what the ranks average."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    part = slice(0, 1) if rank == 0 else slice(1, ROWS)
    rows = batch()[0][part]
    replicated = DistributedDataParallel(Student(), process_group=group)
    student_loss(replicated(rows), replicated.module.head.weight, part, num_items=ROWS / size).backward()
    same_gradients(replicated, "DDP")

    mesh = DeviceMesh.from_group(group, "cpu")
    for own_group in (False, True):
        model: Any = Student()
        if own_group:
            fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(TypeError, match="student_weight is a DTensor.*unshard"):
            student_loss(torch.zeros(1, HIDDEN), model.head.weight, slice(0, 1))
        hidden = model(rows)
        if own_group:
            model.head.unshard()
        student_loss(hidden, model.head.weight, part, num_items=ROWS / size).backward()
        same_gradients(model, f"FSDP2, head in its own group: {own_group}")

    model = Student()  # gathered by full_tensor(), which the documents warn of
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole = model.head.weight.full_tensor()
    student_loss(model(rows), whole, part, num_items=ROWS / size).backward()
    with pytest.raises(AssertionError, match="full_tensor: head.weight"):
        same_gradients(model, "full_tensor")


def verl_over_tensor_parallel_ranks(group: Any) -> None:
    """verl's Megatron path: 5 + 4 tokens in sequences padded to even lengths, half of the vocabulary a rank."""
    patch = pytest.MonkeyPatch()
    verl = verl_restated.install(patch)
    verl_modes.register()
    logits, teacher = (
        [peaked(n, WIDTH, seed=seed + n, scale=1.0).float() for n in (5, 4)] for seed in (1, 2)
    )
    best = [x.log_softmax(-1).topk(3) for x in teacher]
    data = {
        "teacher_ids": torch.nested.as_nested_tensor([x.indices.int() for x in best], layout=torch.jagged),
        "teacher_logprobs": torch.nested.as_nested_tensor([x.values for x in best], layout=torch.jagged),
        "distillation_only": True,
    }
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    verl.ranks.tensor = (rank, size, group)
    packed, _ = verl.preprocess_thd_engine(torch.nested.as_nested_tensor(logits, layout=torch.jagged), True)
    shard = packed.chunk(size, dim=-1)[rank].clone().requires_grad_()
    whole = torch.cat(logits).requires_grad_()
    for mode, divergence in verl_modes.DIVERGENCES.items():
        config = SimpleNamespace(strategy="megatron")
        distillation = SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode=mode))
        got = verl.distillation_ppo_loss(config, distillation, data=data, student_logits=shard)[
            verl_modes.LOSSES
        ]
        lists = torch.cat([x.indices for x in best]), torch.cat([x.values for x in best])
        want = topk_tail_kl(whole, teacher_topk=lists, divergence=divergence).kl
        real = [0, 1, 2, 3, 4, 6, 7, 8, 9]  # row 5 pads the first sequence
        assert got[0, 5] == 0
        torch.testing.assert_close(got[0, real], want, **CLOSE)
        (part,) = torch.autograd.grad(got.square().sum(), shard)
        (full,) = torch.autograd.grad(want.square().sum(), whole)
        torch.testing.assert_close(part[0, real], full.chunk(size, dim=-1)[rank], atol=1e-5, rtol=1e-5)
        assert not part[0, 5].any()
    patch.undo()


def run(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pair: Any = dist.new_group([0, 1])
    everyone: Any = dist.group.WORLD
    for group, widths in ((pair, [6, 4]), (everyone, [3, 6, 1])):
        if group is pair and rank > 1:
            continue
        shards_equal_the_whole(group, widths)
        tensor_parallel_head(group)
        if group is pair:
            checks: list[Callable[[Any], None]] = [ranks_with_1_and_4_tokens, verl_over_tensor_parallel_ranks]
            for check in checks:
                check(group)
    dist.barrier()
    dist.destroy_process_group()
