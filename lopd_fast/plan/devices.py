"""Devices to plan for: their memory, and what they reach of their peak speeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lopd_fast.errors import UserError

GB = 1e9
USABLE = 0.9  # of a device's memory; the rest is for its own context, fragments, and workspaces of libraries
# Shares of the peaks that a time is estimated with. They are assumptions: nothing here is measured.
FLOPS_SHARE = 0.5
BANDWIDTH_SHARE = 0.7
LAUNCH = 1e-5  # s: how fast eager code hands one operation to a device


@dataclass(frozen=True)
class Device:
    """What a plan is held against."""

    name: str
    bytes: float  # of memory that a run can have
    half_flops: float  # FLOP/s in bf16, dense
    flops: float  # FLOP/s in fp32
    bandwidth: float  # bytes/s
    cuda: bool = True

    @property
    def usable(self) -> float:
        """Bytes that a plan may fill."""
        return USABLE * self.bytes

    def seconds(self, flops: float, dtype: torch.dtype, moved: float) -> float:
        """Time of one operation: the slowest of its arithmetic, its memory traffic and its launch."""
        peak = self.half_flops if dtype.itemsize == 2 else self.flops
        return max(flops / (FLOPS_SHARE * peak), moved / (BANDWIDTH_SHARE * self.bandwidth), LAUNCH)


# Memory in GB, dense bf16 TFLOP/s, fp32 TFLOP/s, TB/s, from the makers' data sheets.
_SHEETS = {
    "h100-80gb": (80, 989, 67, 3.35),
    "h200-141gb": (141, 989, 67, 4.8),
    "a100-80gb": (80, 312, 19.5, 2.04),
    "a100-40gb": (40, 312, 19.5, 1.56),
    "l40s-48gb": (48, 362, 91.6, 0.864),
    "rtx4090-24gb": (24, 165, 82.6, 1.01),
}


def named_device(name: str) -> Device:
    """A GPU by name.

    Raises:
        UserError: the name is not known.
    """
    if name not in _SHEETS:
        raise UserError(f"There is no GPU '{name}' in the list; it has {', '.join(_SHEETS)}.")
    memory, half, single, bandwidth = _SHEETS[name]
    return Device(name, memory * GB, half * 1e12, single * 1e12, bandwidth * 1e12)


def this_device(device: torch.device) -> Device:
    """The device at hand with the memory that is free on it now; its speeds are those of an H100 if it is a GPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Device(torch.cuda.get_device_name(device), free, 989e12, 67e12, 3.35e12)
    return Device("this machine's CPU", free_ram(), 1e11, 1e11, 2e10, cuda=False)


def free_ram() -> float:
    """Bytes of RAM that the system, and the control group that this process is in, have left."""
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    try:
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no such group, or no limit in it
        pass
    return float(free)
