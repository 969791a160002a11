"""What every test gets: no network, one thread, fp32 and fixed seeds."""

import os
import random
from collections.abc import Iterator

# Read when the libraries are imported, so these come first. The kernels run in Triton's interpreter, on the CPU.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)

# The same examples on every run, and no limit on the time of one: a shared machine is slow at random.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Seed every generator and give each test fp32 with autograd on, whatever the one before it left."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    yield
