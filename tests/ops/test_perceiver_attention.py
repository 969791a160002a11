"""The kernels of the ragged cross-attention, in Triton's interpreter, against plain attention in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lopd_fast import kernel_backend
from lopd_fast.kernels import perceiver_attention, perceiver_gradient, perceiver_tiles
from lopd_fast.qformer import QFormer
from lopd_fast.ragged_attention import RaggedMemory
from lopd_fast.ragged_kernels import KernelMemory
from lopd_fast.ragged_torch import TorchMemory

RAGGED = [0, 1, 7, 65, 1033]
NAMES = ("out", "query", "latent", "memory")


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(
    lengths: list[int], queries: int, heads: int, dim: int, dtype: torch.dtype = torch.float32, uses: int = 1
) -> dict[str, Tensor]:
    """Queries and latents of `uses` layers, a memory, and upstream gradients; scores are far from uniform."""
    batch = len(lengths)
    shapes = dict(
        query=(uses, batch, queries, heads, dim),
        latent=(uses, batch, queries, 2, heads, dim),
        memory=(sum(lengths), 2, heads, dim),
        upstream=(uses, batch, queries, heads, dim),
    )
    drawn = {name: torch.randn(shape) for name, shape in shapes.items()}
    drawn["query"] *= 3
    return {name: x.to(dtype) for name, x in drawn.items()}


def plain(given: dict[str, Tensor], lengths: list[int]) -> dict[str, Tensor]:
    """Softmax attention of each sample over its own rows and latents, by autograd in fp64."""
    leaf = {name: given[name].double().requires_grad_() for name in ("query", "latent", "memory")}
    memories = leaf["memory"].split(lengths)
    uses = []
    for query, latent in zip(leaf["query"], leaf["latent"], strict=True):
        samples = []
        for q, own, memory in zip(query, latent, memories, strict=True):
            key, value = torch.cat([memory, own]).transpose(0, 2).unbind(1)  # (H, L + Q, D)
            scores = q.transpose(0, 1) @ key.mT / q.shape[-1] ** 0.5
            samples.append((scores.softmax(-1) @ value).transpose(0, 1))
        uses.append(torch.stack(samples))
    out = torch.stack(uses)
    out.backward(given["upstream"].double())
    return {"out": out.detach()} | {name: x.grad for name, x in leaf.items() if x.grad is not None}


def attended(given: dict[str, Tensor], lengths: list[int], backend: str = "triton") -> dict[str, Tensor]:
    leaf = {name: given[name].clone().requires_grad_() for name in ("query", "latent", "memory")}
    uses, _, queries = given["query"].shape[:3]
    memory = RaggedMemory(leaf["memory"], offsets_of(lengths), queries, uses, backend=backend)
    assert isinstance(memory.keys, KernelMemory) == (backend == "triton")
    out = torch.stack([memory.attend(*layer) for layer in zip(leaf["query"], leaf["latent"], strict=True)])
    out.backward(given["upstream"])
    return {"out": out.detach()} | {name: x.grad for name, x in leaf.items() if x.grad is not None}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a launcher allocates holds NaN until a kernel writes it, and past the end of each row of work."""

    def empty(*shape: Any, **options: Any) -> Tensor:
        return torch.full(shape[0] if len(shape) == 1 else shape, float("nan"), **options)

    class Poisoning:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    for module in (perceiver_attention, perceiver_gradient):
        monkeypatch.setattr(module, "torch", Poisoning())


@pytest.mark.parametrize(
    ("lengths", "queries", "heads", "dim"),
    [
        (RAGGED, 8, 1, 72),
        ([70, 1, 33], 32, 1, 96),
        ([0, 1, 7, 65], 1, 2, 80),
        ([3, 0, 40], 8, 2, 160),
        ([7, 0], 32, 1, 128),
        ([35, 0], 40, 1, 64),  # more queries than a block
        ([5, 2], 3, 3, 12),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("poisoned")
def test_values_and_gradients_of_every_shape(lengths: list[int], queries: int, heads: int, dim: int) -> None:
    given = inputs(lengths, queries, heads, dim)
    expected = plain(given, lengths)
    found = attended(given, lengths)
    for name in NAMES:
        assert relative_error(found[name], expected[name]) < 1e-5, name
    for sample, (mine, right) in enumerate(zip(found["out"][0], expected["out"][0], strict=True)):
        assert relative_error(mine, right) < 1e-5, f"sample {sample}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_memory_of_several_layers_and_the_same_bits_twice() -> None:
    lengths = [20, 0, 40]
    given = inputs(lengths, 5, 1, 16, uses=3)
    expected = plain(given, lengths)
    first, second = attended(given, lengths), attended(given, lengths)
    for name in NAMES:
        assert relative_error(first[name], expected[name]) < 1e-5, name
        assert torch.equal(first[name], second[name]), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_wide_heads_are_summed_in_steps_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_steps(*asked: Any) -> dict[str, Any]:
        return perceiver_tiles.constants(*asked) | dict(STEP=16)

    for module in (perceiver_attention, perceiver_gradient):
        monkeypatch.setattr(module, "constants", in_steps)
    lengths = [0, 40, 3]
    given = inputs(lengths, 3, 1, 40)
    expected, found = plain(given, lengths), attended(given, lengths)
    for name in NAMES:
        assert relative_error(found[name], expected[name]) < 1e-5, name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_a_few_roundings_of_plain_torch(dtype: torch.dtype) -> None:
    lengths = [0, 7, 130]
    given = inputs(lengths, 8, 1, 40, dtype)
    expected = plain(given, lengths)
    found, twin = attended(given, lengths), attended(given, lengths, backend="torch")
    for name in NAMES:
        assert found[name].dtype == dtype
        # The interpreter cuts bf16 off where the hardware rounds it: up to twice the error.
        assert (
            relative_error(found[name], expected[name])
            < 2.5 * relative_error(twin[name], expected[name]) + 1e-4
        )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_views_of_any_strides_are_read_where_they_lie() -> None:
    lengths = [5, 0, 20]
    given = inputs(lengths, 4, 2, 16)
    expected = attended(given, lengths)
    strided = {
        "query": given["query"].transpose(2, 3).contiguous().transpose(2, 3),
        "latent": given["latent"].transpose(2, 4).contiguous().transpose(2, 4),
        "memory": torch.stack([given["memory"], given["memory"]], -1)[..., 1],
        "upstream": given["upstream"],
    }
    found = attended(strided, lengths)
    for name in NAMES:
        assert torch.equal(found[name], expected[name]), name

    given["upstream"] = torch.ones(1, 1, 1, 1, 1).expand_as(given["upstream"])  # of a plain .sum()
    assert relative_error(attended(given, lengths)["memory"], plain(given, lengths)["memory"]) < 1e-5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_in_the_hundreds_neither_overflow_nor_leak() -> None:
    given = inputs([70], 2, 1, 16)
    given["memory"][66, 0, 0] = given["query"][0, 0, 0, 0] * 100
    found, expected = attended(given, [70]), plain(given, [70])
    torch.testing.assert_close(found["out"][0, 0, 0, 0], given["memory"][66, 1, 0])
    for name in NAMES:  # exact gradients are 0 here: what is left is the rounding of keys in the hundreds
        torch.testing.assert_close(found[name], expected[name].float(), rtol=1e-4, atol=1e-3, msg=name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_qformer_is_the_same_on_either_backend() -> None:
    torch.manual_seed(0)
    modules = [
        QFormer(32, num_queries=4, depth=2, heads=1, backend=backend) for backend in ("torch", "triton")
    ]
    modules[1].load_state_dict(modules[0].state_dict())
    memory, upstream, grads = torch.randn(14, 32), torch.randn(3, 4, 32), []
    for module in modules:
        leaf = memory.clone().requires_grad_()
        (module(leaf, offsets_of([0, 9, 5])) * upstream).sum().backward()
        grads.append({"memory": leaf.grad} | {name: p.grad for name, p in module.named_parameters()})
    for name, right in grads[0].items():
        assert right is not None and right.norm() > 0, name
        assert relative_error(grads[1][name], right.double()) < 1e-5, name
    with torch.no_grad():
        torch.testing.assert_close(*(module(memory, offsets_of([0, 9, 5])) for module in modules))
    assert modules[1](memory[:0], offsets_of([])).shape == (0, 4, 32)


def test_what_the_kernels_do_not_compute_goes_to_torch() -> None:
    for dtype, dim in ((torch.float64, 16), (torch.float32, 288)):
        memory = RaggedMemory(torch.randn(3, 2, 1, dim, dtype=dtype), offsets_of([3]), 2, backend="triton")
        assert isinstance(memory.keys, TorchMemory)
    assert not kernel_backend.uses_kernels("auto", torch.device("cpu"))


def test_the_backend_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert kernel_backend.uses_kernels("auto", torch.device("cuda"))
    with pytest.raises(ValueError, match="needs CUDA tensors, not cpu ones"):
        kernel_backend.uses_kernels("triton", torch.device("cpu"))
    monkeypatch.setattr(kernel_backend, "_has_triton", lambda: False)
    assert not kernel_backend.uses_kernels("auto", torch.device("cuda"))
    with pytest.raises(ValueError, match="needs the package triton"):
        kernel_backend.uses_kernels("triton", torch.device("cuda"))


def test_chunks_cover_every_row_once() -> None:
    chunks, ranges = perceiver_tiles.chunk_table([0, 0, 5, 5, 12], 4, torch.device("cpu"))
    assert chunks.tolist() == [[1, 0, 4], [1, 4, 5], [3, 5, 9], [3, 9, 12]]
    assert ranges.tolist() == [0, 0, 2, 2, 4]
    assert perceiver_tiles.chunk_table([0], 4, torch.device("cpu"))[0].shape == (0, 3)
    keys = [perceiver_tiles.chunk_keys(tokens, heads) for tokens, heads in ((100, 2), (300_000, 32))]
    assert keys == [128, 1024]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_offsets_of_rows_are_64_bits() -> None:
    """Tokens from 600,000 on of a memory of 4,096 numbers a token lie beyond 2^31."""
    memory = torch.empty(600_064 * 4096, dtype=torch.float16).view(-1, 2, 1, 2048)[..., :16]
    memory[-64:] = torch.randn(64, 2, 1, 16).half()
    query, latent = torch.randn(1, 1, 1, 16).half(), torch.randn(1, 1, 2, 1, 16).half()
    far = perceiver_attention.attend(query, memory, [600_000, 600_064], latent)
    near = perceiver_attention.attend(query, memory[-64:].clone(), [0, 64], latent)
    for one, other in zip(far, near, strict=True):
        assert torch.equal(one, other)
