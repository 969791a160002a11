"""Sharded heads, real DTensors and batches spread over ranks, on gloo; the other parallel test has more values."""

from pathlib import Path

from ops import vocab_parallel
from torch.multiprocessing.spawn import spawn


def test_sharded_heads_and_uneven_ranks(tmp_path: Path) -> None:
    """2 and 3 processes to 1e-6; tensor-parallel and FSDP2 weights; ranks with 1 and 4 tokens; verl's Megatron path."""
    spawn(vocab_parallel.run, args=(3, str(tmp_path / "store")), nprocs=3, join=True)
