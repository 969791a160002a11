"""What a run writes is read by whom the umask lets, tensors too."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch

from lopd_fast.checkpoint import save_checkpoint


@pytest.fixture(params=[0o027, 0o077])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_the_umask_rules(mode: int, tmp_path: Path):
    parts = tiny.parts()
    bank = parts.bank
    save_checkpoint(
        tmp_path / "run", 1, {"a": {"x": torch.ones(2)}}, {}, extra=lambda folder: bank.save(folder / "bank")
    )
    parts.student.save(tmp_path / "student", parts.renderer.tokenizer)
    parts.backbone.save_adapter("student", tmp_path / "adapter")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) == 4
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: oct(mode) for path in files
    }
