"""What the fused loss holds in memory, and in which precision it adds up."""

from typing import Any

import pytest
import torch
from ops.memory import LargestTensor
from ops.oracle import relative_error

from lopd_fast import fused_linear_topk_tail_kl
from lopd_fast.scratch import release_scratch, scratch


def test_no_tensor_grows_with_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times the rows, the same largest tensor: one side of a chunk and a tile, both for a head that learns."""
    monkeypatch.setattr("lopd_fast.fused_tiles.TILE_BYTES", 1)  # tiles of 512 columns
    width, hidden, chunk = 3000, 8, 16
    weight = torch.randn(width, hidden)
    for rows in (64, 1024):
        student = torch.randn(rows, hidden, requires_grad=True)
        teacher = torch.randn(rows, hidden, requires_grad=True)
        for columns, learns in ((width + 512, False), (2 * width, True)):
            weight.requires_grad_(learns)
            with LargestTensor() as tracked:
                fused_linear_topk_tail_kl(student, weight, teacher, chunk_size=chunk).loss.backward()
            assert tracked.bytes == columns * chunk * 4, f"{rows} rows"


def test_chunks_are_sized_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, width = 1 << 20, 5000
    monkeypatch.setattr("lopd_fast.fused_linear.CHUNK_BYTES", {"cpu": budget})
    monkeypatch.setattr("lopd_fast.fused_tiles.TILE_BYTES", 1)  # 512 columns more
    student, teacher = torch.randn(300, 4), torch.randn(300, 4)
    with LargestTensor() as tracked:
        fused_linear_topk_tail_kl(student, torch.randn(width, 4), teacher)
    assert budget / 2 < tracked.bytes <= budget * (width + 512) / width


def test_scratch_is_kept_and_given_to_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call takes no new memory, a call within a call its own; inference mode and dtypes leave no trace."""

    def memory(x: torch.Tensor) -> int:
        return x.untyped_storage().data_ptr()

    like = torch.empty(0)
    release_scratch()
    with torch.inference_mode(), scratch(like, (10, 90), (1, 100)) as (first, second):
        kept = memory(first)
        assert memory(second) == kept and first.shape == (10, 90) and second.shape == (1, 100)
    with scratch(like, (10, 100)) as (outer,), scratch(like, (1, 10)) as (inner,):
        assert memory(outer) == kept and memory(inner) != kept
    release_scratch()
    with torch.inference_mode(), scratch(like, (10, 100)) as (first,):
        kept = memory(first)
    with scratch(like.double(), (5, 100)) as (again,):
        again.zero_()
        assert memory(again) == kept and again.dtype == torch.float64
    monkeypatch.setattr("lopd_fast.scratch.MOST_BYTES", 4000)
    with scratch(like, (1, 1001)) as (large,):
        assert memory(large) != kept
    with scratch(like, (1, 1)) as (again,):
        assert memory(again) == kept, "more than may be kept was kept"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_memory_unless_asked(dtype: torch.dtype) -> None:
    """Frozen heads get no (V, H) sums, and half-precision weights are never widened whole."""
    width, hidden, chunk = 20_000, 64, 2
    weight = torch.randn(width, hidden, dtype=dtype, requires_grad=True)
    student, teacher = torch.randn(8, hidden, dtype=dtype), torch.randn(8, hidden, dtype=dtype)
    with torch.no_grad(), LargestTensor() as tracked:
        fused_linear_topk_tail_kl(student, weight, teacher, chunk_size=chunk)
    assert tracked.bytes < width * hidden * 4 / 2
    student.requires_grad_()
    with LargestTensor() as tracked:
        fused_linear_topk_tail_kl(student, weight.detach(), teacher, chunk_size=chunk).loss.backward()
    assert tracked.bytes < width * hidden * 4 / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_over_many_chunks(dtype: torch.dtype) -> None:
    """512 chunks: within the rounding of one bf16 number, and the same as in 4 chunks. A bf16 sum is 2.7 % off."""
    rows, hidden, width = 8192, 64, 32
    # Rows that agree add up instead of cancelling: the sum grows until bf16 no longer sees the next chunk.
    student, teacher = 1 + 0.5 * torch.randn(rows, hidden), 1 + 0.5 * torch.randn(rows, hidden)
    weight = 0.1 * torch.randn(width, hidden)
    student, teacher, weight = (x.to(dtype) for x in (student, teacher, weight))
    grads: dict[str, Any] = {}
    for name, kind, chunk in (("many", dtype, 16), ("few", dtype, 2048), ("exact", torch.float64, 2048)):
        leaf = weight.detach().to(kind, copy=True).requires_grad_()
        options: Any = dict(k=4, chunk_size=chunk, num_items=1)
        fused_linear_topk_tail_kl(student.to(kind), leaf, teacher.to(kind), **options).loss.backward()
        grads[name] = leaf.grad
    assert relative_error(grads["many"], grads["exact"]) < 2.5e-3
    assert relative_error(grads["many"], grads["few"]) < 2.5e-4
