"""Each kernel against the plain torch reference in its file, on what the loss does not reach: bias, scale, soft-cap."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from ops.oracle import peaked, relative_error

from lopd_fast.kernels._common import Logits
from lopd_fast.kernels.block_stats import block_stats, block_stats_ref
from lopd_fast.kernels.logits_grad import logits_grad, logits_grad_ref
from lopd_fast.kernels.select_support import select_support, select_support_ref
from lopd_fast.kernels.support_logprobs import support_logprobs, support_logprobs_ref

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cap_gain", [None, 8.0])
def test_kernels_apply_bias_scale_and_softcap(cap_gain: float | None) -> None:
    """Rows 3 and 0 of four, in every second column; row 2 of the gradient belongs to no record."""
    x = peaked(4, 300, seed=1).float()[:, ::2]
    index = torch.tensor([3, 0])
    logits = Logits(x, index, bias=torch.randn(150), gain=0.1 if cap_gain else 0.7, cap_gain=cap_gain)

    peak, total = block_stats(logits)
    want_peak, want_total = block_stats_ref(logits)
    assert relative_error(peak, want_peak) < 1e-6, "peak"
    assert relative_error(total, want_total) < 2e-6, "total"
    ids = select_support(logits, peak, 5)
    assert torch.equal(ids, select_support_ref(logits, 5)), "ids"

    ids[1, 3:] = -1
    labels = torch.stack([ids[0, 1], torch.tensor(149)])
    side = (
        torch.randn(2, 5) - 3,
        -torch.rand(2),
        logits.values().logsumexp(-1),
        torch.randn(2, 5),
        torch.randn(2),
    )
    arguments = (ids, side, torch.randn(2), torch.randn(2), labels)
    want = logits_grad_ref(logits, *arguments)
    out = torch.full((3, 150), float("nan"))
    logits_grad(logits, out, torch.tensor([1, 0, -1]), *arguments)
    assert relative_error(out[:2], want[[1, 0]]) < 2e-6, "gradient"
    assert not out[2].any(), "gradient of a row without a record"

    rows = x[index].contiguous()
    own = Logits(rows, bias=logits.bias, gain=logits.gain, cap_gain=cap_gain)
    assert relative_error(logits_grad(own, rows, None, *arguments), want) < 2e-6, "gradient in place"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cap_gain", [None, 8.0])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_support_logprobs_is_the_reference(cap_gain: float | None, k: int) -> None:
    """Two ids of one block, padding, a support that holds all there is of a block, and rows of -inf but for a few."""
    x = peaked(4, 200, seed=2).float()
    x[2, 3:] = float("-inf")
    logits = Logits(x, bias=torch.randn(200), gain=0.1 if cap_gain else 0.7, cap_gain=cap_gain)
    ids = select_support(logits, block_stats(logits)[0], k)
    ids[1, k // 2 :] = -1
    labels = torch.tensor([0, 199, 1, 64])
    got = support_logprobs(logits, block_stats(logits), ids, labels)
    want = support_logprobs_ref(
        Logits(x.double(), bias=logits.bias, gain=logits.gain, cap_gain=cap_gain), ids, labels
    )
    for name, a, b in zip(("log_support", "log_tail", "tail_lse", "log_label"), got, want, strict=True):
        assert a is not None and b is not None
        finite = b.isfinite()
        assert torch.equal(a[~finite].double(), b[~finite]), name
        assert torch.allclose(a[finite].double(), b[finite], rtol=2e-6, atol=2e-6), name


def test_every_kernel_compiles_without_a_spill(tmp_path: Path) -> None:
    """The cubins of the most demanding configuration of each kernel, for three generations, on this machine."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "sass_report.py"), "--quick", "--json", "report.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["kernels"]
    kernels = ("block_stats", "select", "support_logprobs", "bucket_divergence", "logits_grad")
    kernels += (
        "attend_chunk",
        "attend_combine",
        "query_gradient_chunk",
        "latent_gradient",
        "memory_gradient",
    )
    assert {(row["kernel"], row["arch"]) for row in rows} == set(
        product(kernels, ("sm_80", "sm_90", "sm_100"))
    )
    for row in rows:
        assert row["spill_bytes"] == 0 and row["registers"] > 0, row
