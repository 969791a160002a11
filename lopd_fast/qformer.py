"""The composer's compressor: a QFormer (Perceiver resampler) that turns a ragged batch of memories into latents.

For every sample, with memory M (L, dim) and learned latents Z (num_queries, dim):

    M <- proj_in(M)
    depth times:  K, V = to_kv([norm1(M) ; norm2(Z)])          keys and values of the memory, then of the latents
                  Z <- Z + to_out(softmax(to_q(norm2(Z)) K^T / sqrt(dim_head)) V)
                  Z <- Z + feed_forward(Z)                     LayerNorm, Linear, GELU, Linear
    output = norm_out(proj_out(Z))

Source: "Latent On-Policy Self-Distillation", arXiv 2608.13040; the layer is Flamingo's resampler, arXiv 2204.14198.
M is the same in every layer, so a module that is applied depth times normalises and projects it once, not depth times.
Samples are rows of one packed tensor told apart by `cu_seqlens`, so nothing is padded to the longest memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from lopd_fast.ragged_attention import RaggedMemory, checked_offsets
from lopd_fast.shared_weight import SharedWeight


class QFormer(nn.Module):
    """Compresses each memory of a ragged batch into `num_queries` latents.

    Fixed by the reference's checkpoints: the parameter names (`latents`, `proj_in`, `proj_out`, `norm_out`,
    `layers.0.{norm1,norm2,to_q,to_kv,to_out}`, `layers.1.{0,1,3}`; with share_layers=False the same names one level
    down, `layers.{i}.0.*` and `layers.{i}.1.*`), which linears have a bias (proj_in and proj_out), to_kv holding keys
    before values, the exact GELU, and proj_out before norm_out.
    Not told by the tensors, so taken from the reference's code: the number of heads (it uses the backbone's own),
    depth 8 when layers are shared, LayerNorm eps 1e-5. It stores `latents` as (1, num_queries, dim), here
    (num_queries, dim); `from_reference_checkpoint` reads both. Assumed here: head size 64 if neither heads nor
    dim_head is given.

    dim: width of memory and latents.  heads, dim_head: either may be left out and is then dim / the other; given
    together their product is the attention's inner width and need not be dim.  ff_mult: feed-forward width / dim.
    backend: of the attention, "torch" or "triton", or "auto" for triton on CUDA and torch elsewhere.
    Raises ValueError for a size below 1 or for a width that the heads do not divide.
    """

    def __init__(
        self,
        dim: int,
        num_queries: int = 32,
        depth: int = 8,
        heads: int | None = None,
        dim_head: int | None = None,
        ff_mult: int = 4,
        share_layers: bool = True,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        sizes = dict(
            dim=dim, num_queries=num_queries, depth=depth, heads=heads, dim_head=dim_head, ff_mult=ff_mult
        )
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"QFormer: {name} must be at least 1, got {size}.")
        heads, dim_head = _head_sizes(dim, heads, dim_head)

        self.dim, self.num_queries, self.depth = dim, num_queries, depth
        self.heads, self.dim_head, self.share_layers, self.backend = heads, dim_head, share_layers, backend
        self.latents = nn.Parameter(torch.randn(num_queries, dim) * dim**-0.5)
        self.proj_in = nn.Linear(dim, dim)
        self.proj_out = nn.Linear(dim, dim)
        self.norm_out = nn.LayerNorm(dim)

        def layer() -> nn.ModuleList:
            return nn.ModuleList([PerceiverAttention(dim, heads, dim_head), _feed_forward(dim, ff_mult)])

        self.layers = layer() if share_layers else nn.ModuleList(layer() for _ in range(depth))

    def forward(
        self, memory: Tensor, cu_seqlens: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        """Latents of every memory, (B, num_queries, dim), in the parameters' dtype.

        Either memory (total_tokens, dim) with cu_seqlens (B + 1,) integer, sample b being rows
        cu_seqlens[b]:cu_seqlens[b + 1]; or memory (B, L, dim) with mask (B, L) bool, True where a token is real.
        A sample without a real token attends to its latents alone: finite output and gradient. The values of masked
        tokens are never read. cu_seqlens is read on the host, so pass it there to spare a device sync.

        Raises ValueError for shapes that do not fit the above, or offsets that do not run from 0 up to total_tokens.
        """
        memory, cu_seqlens = _packed(memory, cu_seqlens, mask, self.dim)
        memory = self.proj_in(memory.to(self.proj_in.weight.dtype))  # (total_tokens, dim)
        latents = self.latents[
            None
        ]  # (1, num_queries, dim), and (B, ...) from the first layer's attention on

        applications = self.depth if self.share_layers else 1
        for attention, feed_forward in self._distinct_layers():
            shared = RaggedMemory(
                attention.project_memory(memory),
                cu_seqlens,
                self.num_queries,
                applications,
                backend=self.backend,
            )
            layer = _AppliedLayer(attention, feed_forward, shared)
            for _ in range(applications):
                latents = layer(latents)
        return self.norm_out(self.proj_out(latents))

    def _distinct_layers(self) -> Iterator[Any]:
        return iter([self.layers] if self.share_layers else self.layers)

    @classmethod
    def from_reference_checkpoint(
        cls, path: str | Path, heads: int | None = None, depth: int | None = None
    ) -> QFormer:
        """Builds the module a checkpoint holds and loads it, on the CPU, in the checkpoint's dtype.

        path: `.safetensors` with the parameters, or `.pt` with them, bare or as the reference saves them
        ({"qformer_state_dict": ..., "config": ...}). Widths, query count and layer sharing are read off the tensors.
        heads: needed unless the file's config tells it (the reference uses the backbone's num_attention_heads).
        depth: of shared layers, if the config does not tell it; 8 by default.

        Raises ValueError for a file that is missing, of another kind, unsafe to unpickle, or whose names or shapes do
        not make a QFormer, and for heads or depth that contradict it.
        """
        state, config = _read_checkpoint(Path(path))
        shared = "layers.0.to_q.weight" in state
        prefix = "layers." if shared else "layers.0."
        try:
            latents = state["latents"].flatten(0, -2)
            inner = state[f"{prefix}0.to_q.weight"].shape[0]
            ff_inner = state[f"{prefix}1.1.weight"].shape[0]
        except KeyError as missing:
            raise ValueError(
                f"{path} is not a QFormer checkpoint: it has no tensor named {missing}."
            ) from None
        num_queries, dim = latents.shape
        if not shared:
            config = config | {
                "depth": len({name.split(".")[1] for name in state if name.startswith("layers.")})
            }

        heads = _agreed(path, "heads", heads, config.get("heads"), None)
        depth = _agreed(path, "depth", depth, config.get("depth"), 8)
        if heads is None:
            raise ValueError(
                f"{path} does not tell the number of heads: pass heads=, the backbone's num_attention_heads."
            )
        if heads < 1 or inner % heads or ff_inner % dim:
            raise ValueError(
                f"{path}: {heads} heads do not divide the attention width {inner}, "
                f"or the feed-forward width {ff_inner} is no multiple of dim {dim}."
            )
        module = cls(dim, num_queries, depth or 8, heads, inner // heads, ff_inner // dim, shared).to(
            latents.dtype
        )
        try:
            module.load_state_dict(dict(state) | {"latents": latents})
        except RuntimeError as mismatch:
            raise ValueError(f"{path} does not fit a QFormer of dim {dim}: {mismatch}") from None
        return module


class PerceiverAttention(nn.Module):
    """Cross-attention of the latents over [memory ; latents]: its parameters, and the memory's keys and values."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def project_memory(self, memory: Tensor) -> Tensor:
        """memory (total_tokens, dim) -> keys and values (total_tokens, 2, heads, dim_head)."""
        return self.to_kv(self.norm1(memory)).unflatten(-1, (2, self.heads, self.dim_head))


class _AppliedLayer:
    """A layer in one forward pass, in which it may be applied several times: to one memory, with the same weights."""

    def __init__(self, attention: Any, feed_forward: Any, memory: RaggedMemory) -> None:
        self.memory = memory
        self.heads = (attention.heads, attention.dim_head)
        self.norm, self.feed_forward_norm = attention.norm2, feed_forward[0]
        self.to_q, self.to_kv, self.to_out, self.widen = (
            SharedWeight(linear.weight)
            for linear in (attention.to_q, attention.to_kv, attention.to_out, feed_forward[1])
        )
        self.narrow = SharedWeight(feed_forward[3].weight, F.gelu)

    def __call__(self, latents: Tensor) -> Tensor:
        """latents (B, num_queries, dim), or (1, ...) if all samples have the same -> (B, ...) after the layer."""
        normed, batch = self.norm(latents), self.memory.batch
        query = self.to_q(normed).unflatten(-1, self.heads).expand(batch, -1, -1, -1)
        key_value = self.to_kv(normed).unflatten(-1, (2, *self.heads)).expand(batch, -1, -1, -1, -1)
        latents = latents + self.to_out(self.memory.attend(query, key_value).flatten(-2))
        return latents + self.narrow(self.widen(self.feed_forward_norm(latents)))


def _feed_forward(dim: int, mult: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, mult * dim, bias=False),
        nn.GELU(),
        nn.Linear(mult * dim, dim, bias=False),
    )


def _head_sizes(dim: int, heads: int | None, dim_head: int | None) -> tuple[int, int]:
    if heads is not None and dim_head is not None:
        return heads, dim_head
    divisor = heads or dim_head or 64
    if dim % divisor:
        raise ValueError(
            f"QFormer: dim {dim} is not divisible by {'heads' if heads else 'dim_head'} {divisor}; "
            "pass heads that divide it, or both heads and dim_head."
        )
    return (heads, dim // heads) if heads else (dim // divisor, divisor)


def _packed(
    memory: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None, dim: int
) -> tuple[Tensor, Tensor]:
    """Either form of input as (total_tokens, dim) and checked offsets (B + 1,) on the host."""
    if not memory.is_floating_point() or memory.shape[-1:] != (dim,) or memory.dim() not in (2, 3):
        raise ValueError(
            f"memory must be a float tensor (total_tokens, {dim}) or (B, L, {dim}), "
            f"got {tuple(memory.shape)} of {memory.dtype}."
        )
    if memory.dim() == 2:
        if cu_seqlens is None or mask is not None:
            raise ValueError("a packed memory (total_tokens, dim) needs cu_seqlens and no mask.")
        checked_offsets(cu_seqlens, memory.shape[0])
        return memory, cu_seqlens.cpu()
    if mask is None or cu_seqlens is not None:
        raise ValueError("a batched memory (B, L, dim) needs mask and no cu_seqlens.")
    if mask.dtype != torch.bool or mask.shape != memory.shape[:2]:
        raise ValueError(
            f"mask must be bool of shape {tuple(memory.shape[:2])}, got {tuple(mask.shape)} of {mask.dtype}."
        )
    return memory[mask], F.pad(mask.sum(1).cumsum(0), (1, 0)).cpu()


def _read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters by name, and the reference's config where the file has one."""
    if not path.is_file() or path.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{path} is not a .safetensors or .pt file.")
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint of plain tensors: {str(error).splitlines()[0]}"
        ) from None
    config: Any = {}
    if isinstance(content, Mapping) and "qformer_state_dict" in content:
        content, config = content["qformer_state_dict"], content.get("config", {})
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError(f"{path} is not a QFormer checkpoint: it must map parameter names to tensors.")
    return dict(content), dict(config)


def _agreed(path: str | Path, name: str, asked: int | None, stored: Any, default: int | None) -> int | None:
    if asked is not None and stored is not None and asked != stored:
        raise ValueError(f"{path} was made with {name} {stored}, but {name} {asked} was asked for.")
    return asked if asked is not None else stored if stored is not None else default


def qformer_ref(
    state: Mapping[str, Tensor], memory: Tensor, cu_seqlens: Tensor, *, heads: int, depth: int
) -> Tensor:
    """The same maths read straight off the paper: one sample at a time, the memory projected again in every layer.

    state: parameters by name, as in `QFormer.state_dict()`. Plain autograd in the dtype of its inputs, on any device.
    """
    shared = "layers.0.to_q.weight" in state
    outputs = []
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        x = F.linear(memory[start:end], state["proj_in.weight"], state["proj_in.bias"])  # (L, dim)
        latents = state["latents"]
        dim = latents.shape[-1:]
        for index in range(depth):
            prefix = "layers." if shared else f"layers.{index}."
            layer = {
                name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)
            }

            normed = F.layer_norm(latents, dim, layer["0.norm2.weight"], layer["0.norm2.bias"])
            context = torch.cat(
                [F.layer_norm(x, dim, layer["0.norm1.weight"], layer["0.norm1.bias"]), normed]
            )
            query = F.linear(normed, layer["0.to_q.weight"])
            key, value = F.linear(context, layer["0.to_kv.weight"]).chunk(2, dim=-1)
            query, key, value = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (query, key, value))
            weights = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, dim=-1)  # (heads, Q, L + Q)
            attended = (weights @ value).transpose(0, 1).flatten(-2)
            latents = latents + F.linear(attended, layer["0.to_out.weight"])

            hidden = F.layer_norm(latents, dim, layer["1.0.weight"], layer["1.0.bias"])
            hidden = F.gelu(F.linear(hidden, layer["1.1.weight"]))
            latents = latents + F.linear(hidden, layer["1.3.weight"])
        latents = F.linear(latents, state["proj_out.weight"], state["proj_out.bias"])
        outputs.append(F.layer_norm(latents, dim, state["norm_out.weight"], state["norm_out.bias"]))
    return torch.stack(outputs)
