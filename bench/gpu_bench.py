"""What the parts of `gpu_check.py` share: sizes, inputs, timing, and how a result is written down."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kl_problem import Problem, make_problem
from measure import interleaved_ms, quantiles
from torch import Tensor


@dataclass(frozen=True)
class Bench:
    """A device, the sizes to run at (those of Qwen3-8B, or tiny ones), and the file that takes the results."""

    device: torch.device
    small: bool
    file: Path

    @property
    def vocab(self) -> int:
        return 300 if self.small else 151_936

    @property
    def hidden(self) -> int:
        return 32 if self.small else 4096

    @property
    def k(self) -> int:
        return 5 if self.small else 20

    def note(
        self, what: str, values: dict[str, float], limit: str | None = None, ok: bool | None = None
    ) -> None:
        """One result; the names of values are their units. Written at once, whatever comes after."""
        self._write(dict(what=what, values=values, limit=limit, ok=ok))
        print(f"  {what}: {values} {'' if ok is None else 'ok' if ok else 'MISSED'}", flush=True)

    def at_most(
        self, what: str, most: float, unit: str, value: float, others: dict[str, float] | None = None
    ) -> None:
        """A result with a limit, which tiny sizes need not keep if it is on anything but an error."""
        held = None if self.small and unit != "error" else value <= most
        self.note(what, {unit: value} | (others or {}), f"{unit} <= {most:g}", held)

    def at_least(self, what: str, least: float, unit: str, value: float, others: dict[str, float]) -> None:
        held = None if self.small else value >= least
        self.note(what, {unit: value} | others, f"{unit} >= {least:g}", held)

    def yes(self, what: str, ok: bool) -> None:
        self.note(what, dict(yes=float(ok)), "yes", ok)

    def attach(self, results: list[dict[str, Any]]) -> None:
        """Rows of `kl_throughput`, for its picture."""
        self._write(dict(results=results))

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def peaked(self, rows: int, seed: int) -> Tensor:
        """fp32 logits whose softmax is far from flat."""
        noise = self.randn(rows, self.vocab, seed=seed)
        return 2 * noise + 6 * (noise > 2)

    def problem(self, rows: int) -> Problem:
        """bf16 hidden states of both sides and a head, with logits like a language model's (at real sizes)."""
        return make_problem(rows, self.vocab, self.hidden, torch.bfloat16, self.device, self.k)

    def head(self, rows: int) -> list[Tensor]:
        """fp32 student hidden states, a head and teacher hidden states whose gradients fit fp16 at any size."""
        weight = self.randn(self.vocab, self.hidden, seed=1).mul_(self.hidden**-0.5)
        target = weight[torch.arange(rows, device=self.device) * 37 % self.vocab]
        student = 10 * target + 2 * self.randn(rows, self.hidden, seed=3)
        return [student, weight, student + 0.5 * self.randn(rows, self.hidden, seed=4)]

    def milliseconds(self, **calls: Callable[[], Any]) -> dict[str, float]:
        """Median time of each of 5 calls, taken in turns after one that warms up."""
        for call in calls.values():
            call()
        times, errors = interleaved_ms(dict(calls), 1 if self.small else 5, self.device)
        for error in errors.values():
            raise error
        return {name: quantiles(taken)[1] for name, taken in times.items()}

    @functools.cached_property
    def copy_rate(self) -> float:
        """Bytes a second, read and written, of a copy far larger than any cache."""
        source = torch.zeros((1 << 16) if self.small else (4 << 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2e3 * source.numel() / self.milliseconds(copy=lambda: target.copy_(source))["copy"]
