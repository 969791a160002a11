"""Code in the documents runs, and the files and settings that they name exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verl_restated
from torch import nn

from lopd_fast.integrations.verl import DIVERGENCES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONAL = {"trl"}  # a block about these is compiled, and run where its own tests are
BLOCKS = [
    (document.name, number, block)
    for document in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
    )
]


def given(group: Any) -> dict[str, Any]:
    """What the documents take as there: a reader's own tensors and settings."""
    rows, hidden, width = 5, 6, 40
    student_hidden = torch.randn(rows, hidden, requires_grad=True)
    student_weight, teacher_weight = (torch.randn(width, hidden, requires_grad=True) for _ in range(2))
    labels = torch.randint(width, (rows,))
    latents = torch.randn(2, hidden, requires_grad=True)
    lists = [None, *({i: SimpleNamespace(logprob=-1.0 - i) for i in range(n)} for n in (3, 4, 3, 2, 3))]
    lm_head = nn.Linear(hidden, width, bias=False)
    return dict(
        student_hidden=student_hidden,
        student_weight=student_weight,
        student_weight_shard=student_weight,
        teacher_hidden=student_hidden.detach() + latents.mean(0),
        teacher_weight=teacher_weight,
        teacher_weight_shard=teacher_weight,
        lm_head=lm_head,
        labels=labels,
        ids=labels,
        answer=SimpleNamespace(prompt_logprobs=lists),
        group=group,
        global_tokens=rows,
        world_size=1,
        record={"reward": 1.0},
        beta=0.5,
        constraint={"margin_m": 0.05, "anchor_lambda": 0.2},
        cfg={"top_k": 20},
        active=[None],
        c_phi=latents,
        c_phi0=latents.detach(),
    )


@pytest.mark.parametrize(
    "document, number, block", BLOCKS, ids=[f"{name}-{number}" for name, number, _ in BLOCKS]
)
def test_python_blocks(
    document: str, number: int, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = compile(block, f"{document}, block {number}", "exec")
    if any(f"integrations.{name}" in block for name in OPTIONAL):
        for module, names in re.findall(r"^from (lopd_fast\S*) import (.+)$", block, re.MULTILINE):
            source = Path(importlib.util.find_spec(module).origin).read_text()  # pyright: ignore
            assert all(f"def {name.strip()}(" in source for name in names.split(",")), module
        return
    if "runs/demo" in block:  # what a demo leaves; tests/test_demo.py loads and asks such a student
        return
    verl_restated.install(monkeypatch)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        # Names that an earlier block of the document imported stay imported for its reader.
        earlier = [text for name, index, text in BLOCKS if name == document and index < number]
        imports = re.findall(r"^from lopd_fast import .+$", "\n".join(earlier), re.MULTILINE)
        names = given(dist.group.WORLD)
        exec("\n".join(imports), names)
        exec(code, names)
    finally:
        dist.destroy_process_group()
    out = names.get("out")
    loss = out.loss if out is not None else names.get("loss")
    assert loss is None or loss.isfinite()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_settings_that_are_named(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), link
    for path in re.findall(r"\b(?:examples|tests|bench|docs|lopd_fast)/[\w/]+\.(?:py|md|yaml)\b", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"VERL_USE_EXTERNAL_MODULES=([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module
    for mode in re.findall(r"\bloss_mode=(\w+)", text):
        assert mode in DIVERGENCES, mode
