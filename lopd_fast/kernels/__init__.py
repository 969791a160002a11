"""Stands in for the top-level ``kernels/`` folder in a checkout; a wheel holds the kernel files here instead."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
