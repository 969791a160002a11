"""TRL's trainers in two processes of different numbers of tokens, with their own loss and with the fused one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distillation", "sdpo", "sdft", "gkd"])
def test_two_processes(name: str, tmp_path: Path):
    pytest.importorskip("trl", minversion="1.16")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [*launch, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", __file__, name, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same in 2 processes") == 2, done.stdout + done.stderr


def main() -> None:
    """What each of the two processes does: `assert_same_training`, which compares all parameters."""
    import torch.distributed as dist
    import trl_trainers

    name, folder = sys.argv[1:]
    for find_unused in (
        False,
        True,
    ):  # whether the wrapper looks in the model's outputs for unused parameters
        trl_trainers.assert_same_training(
            getattr(trl_trainers, name),
            folder,
            accumulation=2,
            peft=False,
            ddp_backend="gloo",
            ddp_find_unused_parameters=find_unused,
        )
    print(f"the same in {dist.get_world_size()} processes")


if __name__ == "__main__":
    main()
