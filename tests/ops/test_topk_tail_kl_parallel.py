"""A vocabulary split over two and three processes gives the numbers of the whole one."""

from pathlib import Path

from ops import parallel
from torch.multiprocessing.spawn import spawn


def test_two_and_three_shards_equal_the_whole(tmp_path: Path) -> None:
    """6 + 4 and 3 + 6 + 1 of V = 10, outputs and every gradient; k beyond a shard, ties across its edge."""
    spawn(parallel.run, args=(3, str(tmp_path / "store")), nprocs=3, join=True)
