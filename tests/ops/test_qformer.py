"""QFormer against `qformer_ref`, the plain restatement that works sample by sample and re-projects in every layer."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lopd_fast.qformer import QFormer, qformer_ref
from lopd_fast.ragged_attention import RaggedMemory, ragged_cross_attention

RAGGED = [0, 1, 7, 65, 1033]
Run = tuple[Tensor, dict[str, Tensor]]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def make(heads: int = 2, dim_head: int = 12, *, seed: int = 0, **sizes: Any) -> QFormer:
    """A QFormer whose every parameter is away from its default, so that no bias or gain goes unseen."""
    torch.manual_seed(seed)
    module = QFormer(heads * dim_head, heads=heads, **sizes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * parameter.std().nan_to_num(0.1).clamp_min(0.1))
    return module


def run(module: QFormer, memory: Tensor, lengths: list[int]) -> Run:
    memory = memory.clone().requires_grad_()
    module.zero_grad()
    output = module(memory, offsets_of(lengths))
    output.backward(upstream_like(output))
    return output.detach(), gradients(dict(module.named_parameters()), memory)


def run_ref(module: QFormer, memory: Tensor, lengths: list[int], dtype: torch.dtype) -> Run:
    state = {name: p.detach().to(dtype).requires_grad_() for name, p in module.named_parameters()}
    memory = memory.to(dtype).clone().requires_grad_()
    output = qformer_ref(state, memory, offsets_of(lengths), heads=module.heads, depth=module.depth)
    output.backward(upstream_like(output))
    return output.detach(), gradients(state, memory)


def upstream_like(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)


def gradients(parameters: dict[str, Tensor], memory: Tensor) -> dict[str, Tensor]:
    named = parameters | {"memory": memory}
    missing = [name for name, tensor in named.items() if tensor.grad is None]
    assert not missing, f"no gradient reached {missing}"
    return {name: tensor.grad.clone() for name, tensor in named.items() if tensor.grad is not None}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def assert_same(actual: Run, expected: Run, tolerance: float) -> None:
    assert actual[0].shape == expected[0].shape
    for sample, (mine, right) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert relative_error(mine, right) < tolerance, f"output of sample {sample}"
    assert actual[1].keys() == expected[1].keys()
    for name, right in expected[1].items():
        assert relative_error(actual[1][name], right) < tolerance, f"gradient of {name}"


@pytest.mark.parametrize("share_layers", [True, False])
@pytest.mark.parametrize("queries", [1, 8, 32])
@pytest.mark.parametrize("dim_head", [80, 72, 96, 160])
def test_ragged_batch_matches_the_restatement(dim_head: int, queries: int, share_layers: bool) -> None:
    module = make(2, dim_head, num_queries=queries, depth=3, share_layers=share_layers)
    memory = torch.randn(sum(RAGGED), module.dim) * 3 + 1
    ours = run(module, memory, RAGGED)
    assert_same(ours, run_ref(module, memory, RAGGED, torch.float32), 1e-4)
    assert_same(ours, run_ref(module, memory, RAGGED, torch.float64), 1e-4)


def test_released_depth_and_an_inner_width_that_is_not_dim() -> None:
    torch.manual_seed(0)
    module = QFormer(40, num_queries=5, depth=8, heads=3, dim_head=16, ff_mult=2)
    memory = torch.randn(30, 40)
    assert module.state_dict()["layers.0.to_q.weight"].shape == (48, 40)
    assert_same(run(module, memory, [11, 0, 19]), run_ref(module, memory, [11, 0, 19], torch.float64), 1e-5)


def test_attention_gradients_by_finite_differences_and_strided_inputs() -> None:
    torch.manual_seed(0)
    lengths, queries, heads, dim_head = [3, 0, 4], 2, 2, 3
    memory = torch.randn(7, heads, 2, dim_head, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(3, heads, 3, queries, dim_head, dtype=torch.float64, requires_grad=True)

    def attend(memory: Tensor, latent: Tensor) -> Tensor:
        latent = latent.permute(0, 3, 2, 1, 4)  # (B, Q, 3, H, D), of the strides that a caller may have
        return ragged_cross_attention(
            latent[:, :, 0], memory.transpose(1, 2), offsets_of(lengths), latent[:, :, 1:]
        )

    assert torch.autograd.gradcheck(attend, (memory, latent))


@pytest.mark.parametrize("used", [0, 1])
def test_a_use_whose_output_goes_nowhere_adds_nothing(used: int) -> None:
    torch.manual_seed(0)
    memory = torch.randn(5, 2, 2, 8, requires_grad=True)
    query, latent = torch.randn(2, 1, 3, 2, 8), torch.randn(2, 1, 3, 2, 2, 8)
    shared = RaggedMemory(memory, offsets_of([5]), num_queries=3, uses=2)
    outputs = [shared.attend(*layer) for layer in zip(query, latent, strict=True)]
    (found,) = torch.autograd.grad(outputs[used].square().sum(), memory)
    alone = ragged_cross_attention(query[used], memory, offsets_of([5]), latent[used])
    torch.testing.assert_close(found, *torch.autograd.grad(alone.square().sum(), memory))


def test_peaked_scores_do_not_overflow() -> None:
    torch.manual_seed(0)
    query, latent, memory = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 2, 8), torch.randn(5, 2, 2, 8)
    memory[3, 0] = query[0, 0] * 300  # scores of a few hundred, beyond exp() in fp32
    memory.requires_grad_()
    output = ragged_cross_attention(query, memory, offsets_of([5]), latent)
    torch.testing.assert_close(output[0, 0], memory[3, 1])
    output.square().sum().backward()
    assert memory.grad is not None and memory.grad.isfinite().all()


def test_empty_memories_leave_the_latents_to_themselves() -> None:
    module = make(num_queries=4, depth=2)
    memory = torch.randn(6, module.dim)
    output, _ = run(module, memory, [0, 6, 0])
    alone, gradient = run(module, memory[:0], [0])
    assert torch.equal(output[0], output[2])
    torch.testing.assert_close(output[0], alone[0])
    assert relative_error(output[1], output[0]) > 1e-2
    assert all(g.isfinite().all() for g in gradient.values())
    assert gradient["latents"].abs().sum() > 0 and gradient["proj_in.weight"].abs().sum() == 0
    assert module(memory[:0], offsets_of([])).shape == (0, 4, module.dim)


def test_mask_is_the_packed_form_and_never_reads_masked_values() -> None:
    module = make(num_queries=3, depth=2)
    memory = torch.randn(3, 5, module.dim)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    poisoned = memory.masked_fill(~mask.unsqueeze(-1), float("nan")).requires_grad_()
    output = module(poisoned, mask=mask)
    output.backward(upstream_like(output))
    packed_output, packed_gradient = run(module, memory[mask], [3, 0, 5])
    assert torch.equal(output, packed_output)
    assert poisoned.grad is not None
    assert torch.equal(poisoned.grad[mask], packed_gradient["memory"])
    assert (poisoned.grad[~mask] == 0).all()


def test_samples_do_not_see_each_other() -> None:
    module = make(num_queries=3, depth=2)
    memory = torch.randn(12, module.dim, requires_grad=True)
    module(memory, offsets_of([5, 7]))[1].sum().backward()
    assert memory.grad is not None
    assert (memory.grad[:5] == 0).all() and (memory.grad[5:].abs().sum(-1) > 0).all()


def test_same_bits_twice() -> None:
    module = make(num_queries=8, depth=8)
    memory = torch.randn(sum(RAGGED), module.dim)
    first, second = run(module, memory, RAGGED), run(module, memory, RAGGED)
    assert torch.equal(first[0], second[0])
    for name in first[1]:
        assert torch.equal(first[1][name], second[1][name]), name


def test_backward_twice_doubles_and_no_grad_agrees() -> None:
    module = make(num_queries=3, depth=3)
    memory = torch.randn(9, module.dim)
    output, once = run(module, memory, [4, 5])
    module.zero_grad()
    leaf = memory.clone().requires_grad_()
    again = module(leaf, offsets_of([4, 5]))
    again.backward(upstream_like(again), retain_graph=True)
    again.backward(upstream_like(again))
    for name, gradient in gradients(dict(module.named_parameters()), leaf).items():
        torch.testing.assert_close(gradient, 2 * once[name], msg=name)
    with torch.no_grad():
        assert torch.equal(module(memory, offsets_of([4, 5])), output)


def test_half_precision_stays_within_a_few_roundings_of_plain_torch() -> None:
    lengths = [0, 7, 130]
    module = make(2, 40, num_queries=8, depth=3).bfloat16()
    memory = torch.randn(sum(lengths), module.dim).bfloat16()
    exact = run_ref(module, memory, lengths, torch.float64)
    plain = run_ref(module, memory, lengths, torch.bfloat16)
    ours = run(module, memory, lengths)
    assert ours[0].dtype == torch.bfloat16
    assert relative_error(ours[0], exact[0]) < 2 * relative_error(plain[0], exact[0])
    for name, right in exact[1].items():
        assert ours[1][name].dtype == torch.bfloat16
        assert relative_error(ours[1][name], right) < 2 * relative_error(plain[1][name], right) + 1e-3, name


def test_autocast_and_a_memory_of_another_dtype() -> None:
    module = make(2, 40, num_queries=8, depth=3)
    memory, lengths = torch.randn(137, module.dim).bfloat16(), [0, 7, 130]
    exact, _ = run_ref(module, memory, lengths, torch.float64)
    cast, gradient = run(module, memory, lengths)
    assert cast.dtype == torch.float32 and relative_error(cast, exact) < 1e-4
    assert gradient["memory"].dtype == torch.bfloat16 and gradient["latents"].dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(memory, offsets_of(lengths))
    output.float().sum().backward()
    assert relative_error(output, exact) < 3e-2


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 4, 9], "start at 0"),
        ([0, 6, 4, 9], "never decrease"),
        ([0, 4, 8], "end at the 9 memory tokens"),
        ([], r"shape \(B \+ 1,\)"),
    ],
)
def test_bad_offsets_are_refused(offsets: list[int], message: str) -> None:
    module = make(num_queries=2, depth=1)
    with pytest.raises(ValueError, match=message):
        module(torch.randn(9, module.dim), torch.tensor(offsets, dtype=torch.int32))


def test_bad_inputs_are_refused() -> None:
    module = make(num_queries=2, depth=1)
    packed, batched, offsets = torch.randn(9, 24), torch.randn(2, 5, 24), offsets_of([4, 5])
    mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"\(total_tokens, 24\).*got \(9, 23\)"):
        module(packed[:, :23], offsets)
    with pytest.raises(ValueError, match="int64"):
        module(torch.ones(9, 24, dtype=torch.int64), offsets)
    with pytest.raises(ValueError, match="float32"):
        module(packed, offsets.float())
    with pytest.raises(ValueError, match="needs cu_seqlens and no mask"):
        module(packed)
    with pytest.raises(ValueError, match="needs mask and no cu_seqlens"):
        module(batched, offsets)
    with pytest.raises(ValueError, match=r"bool of shape \(2, 5\), got \(2, 4\)"):
        module(batched, mask=mask[:, :4])
    with pytest.raises(ValueError, match="of torch.float32"):
        module(batched, mask=mask.float())
    with pytest.raises(ValueError, match="backend must be .* not 'cuda'"):
        QFormer(24, heads=2, backend="cuda")(packed, offsets)
    keys, query, latent = torch.randn(9, 2, 2, 4), torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2, 2, 4)
    with pytest.raises(ValueError, match="memory of 2 samples needs queries"):
        ragged_cross_attention(query, keys, offsets, latent)
    attended = RaggedMemory(keys, offsets, num_queries=2)
    attended.attend(query[:2], latent[:2])
    with pytest.raises(ValueError, match="as often as it was made for"):
        attended.attend(query[:2], latent[:2])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(dim=576, heads=7), "dim 576 is not divisible by heads 7"),
        (dict(dim=576, dim_head=80), "dim 576 is not divisible by dim_head 80"),
        (dict(dim=100), "dim 100 is not divisible by dim_head 64"),
        (dict(dim=64, num_queries=0), "num_queries must be at least 1, got 0"),
        (dict(dim=64, depth=0), "depth must be at least 1, got 0"),
        (dict(dim=64, heads=-2), "heads must be at least 1, got -2"),
    ],
)
def test_bad_sizes_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QFormer(**sizes)


ATTENTION = [
    "norm1.weight",
    "norm1.bias",
    "norm2.weight",
    "norm2.bias",
    "to_q.weight",
    "to_kv.weight",
    "to_out.weight",
]
LAYER = [f"0.{name}" for name in ATTENTION] + ["1.0.weight", "1.0.bias", "1.1.weight", "1.3.weight"]
ENDS = [
    "latents",
    *(f"{name}.{part}" for name in ("proj_in", "proj_out", "norm_out") for part in ("weight", "bias")),
]


@pytest.mark.parametrize("share_layers", [True, False])
@pytest.mark.parametrize("layout", ["safetensors", "bare", "reference"])
def test_checkpoint_round_trip(tmp_path: Path, layout: str, share_layers: bool) -> None:
    module = make(3, 8, num_queries=5, depth=2, ff_mult=2, share_layers=share_layers)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    layers = ["layers."] if share_layers else ["layers.0.", "layers.1."]
    assert set(state) == {*ENDS, *(prefix + name for prefix in layers for name in LAYER)}

    path = tmp_path / ("phi.safetensors" if layout == "safetensors" else "phi.pt")
    if layout == "safetensors":
        save_file(state, path)
    elif layout == "bare":
        torch.save(state, path)
    else:  # as the reference writes it, latents with a leading 1
        config = dict(
            dim=24, depth=2, dim_head=8, heads=3, num_queries=5, ff_mult=2, share_layers=share_layers
        )
        state["latents"] = state["latents"].unsqueeze(0)
        torch.save({"qformer_state_dict": state, "config": config, "step": 7}, path)

    if layout == "reference":
        loaded = QFormer.from_reference_checkpoint(path)
    else:
        loaded = QFormer.from_reference_checkpoint(path, heads=3, depth=2)
    assert loaded.state_dict().keys() == module.state_dict().keys()
    memory = torch.randn(9, 24)
    assert torch.equal(loaded(memory, offsets_of([4, 5])), module(memory, offsets_of([4, 5])))


def test_checkpoint_keeps_its_dtype_and_default_depth(tmp_path: Path) -> None:
    module = make(3, 8, num_queries=5, depth=8).bfloat16()
    save_file(module.state_dict(), tmp_path / "phi.safetensors")
    loaded = QFormer.from_reference_checkpoint(tmp_path / "phi.safetensors", heads=3)
    assert (loaded.depth, loaded.dim_head, loaded.num_queries) == (8, 8, 5)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


def test_bad_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = dict(make(3, 8, num_queries=5, depth=2).state_dict())
    load = QFormer.from_reference_checkpoint
    save_file(state, "phi.safetensors")
    with pytest.raises(ValueError, match="does not tell the number of heads"):
        load("phi.safetensors")
    with pytest.raises(ValueError, match="5 heads do not divide the attention width 24"):
        load("phi.safetensors", heads=5)
    with pytest.raises(ValueError, match="not a .safetensors or .pt file"):
        load("absent.pt")
    save_file(
        {name: t for name, t in state.items() if name != "layers.0.to_out.weight"}, "partial.safetensors"
    )
    with pytest.raises(ValueError, match="layers.0.to_out.weight"):
        load("partial.safetensors", heads=3)
    save_file({"weight": torch.zeros(3)}, "other.safetensors")
    with pytest.raises(ValueError, match="no tensor named 'latents'"):
        load("other.safetensors", heads=3)
    torch.save({"qformer_state_dict": state, "config": {"heads": 3, "depth": 2}}, "phi.pt")
    with pytest.raises(ValueError, match="made with heads 3, but heads 6 was asked for"):
        load("phi.pt", heads=6)
    Path("torn.safetensors").write_bytes(Path("phi.safetensors").read_bytes()[:50])
    with pytest.raises(ValueError, match="torn.safetensors cannot be read"):
        load("torn.safetensors", heads=3)
    Path("trap.pt").write_bytes(pickle.dumps({"latents": Trap()}, protocol=2))
    with pytest.raises(ValueError, match="trap.pt cannot be read"):
        load("trap.pt", heads=3)
    torch.save({"latents": Trap()}, "zipped_trap.pt")
    with pytest.raises(ValueError, match="zipped_trap.pt cannot be read"):
        load("zipped_trap.pt", heads=3)
    assert not Path("sprung").exists()


def test_bench_runs_at_its_smallest_size(tmp_path: Path) -> None:
    """The table, its rows and its picture; and the row for a device, here on the CPU."""
    code = """if True:
        import json, sys, torch
        sys.path.insert(0, sys.argv.pop(1))
        import composer
        status = composer.main()
        row = composer.large_row("cpu", torch.float32, dim=16, heads=2, memories=3, between=(2, 9), repeats=1)
        print(json.dumps(row))
        sys.exit(status)
    """
    sizes = "--lengths 5 --batches 2 --ragged 3 0 4 --dim 16 --heads 2 --queries 4 --depth 2 --repeats 1"
    options = [*sizes.split(), "--json", "rows.jsonl", "--plot", "rows.png"]
    bench = str(Path(__file__).parents[2] / "bench")
    done = subprocess.run(
        [sys.executable, "-c", code, bench, *options],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["lengths"] for row in found] == [[5, 5], [3, 0, 4]]
    large = json.loads(done.stdout.splitlines()[-1])
    assert len(large["lengths"]) == 3 and all(2 <= length <= 9 for length in large["lengths"])
    for row in [*found, large]:
        assert row["correct"] and row["speedup"] > 0 and row["peak_mib"]["ours"] > 0
        assert max(error for side in row["error"].values() for error in side.values()) < 1e-4
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
