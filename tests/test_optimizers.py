"""8-bit AdamW: near AdamW in a quarter of its memory, and resumed to the same bits."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from lopd_fast import build as building
from lopd_fast.build import build
from lopd_fast.checkpoint import load_checkpoint, save_checkpoint
from lopd_fast.config import OptimConfig
from lopd_fast.errors import UserError
from lopd_fast.optimizer_state import optimizer_tensors, restore_optimizer
from lopd_fast.optimizers import adamw, optimizer_step

KINDS: list[Any] = ["adamw", "adamw8bit", "paged_adamw8bit"]


class Regression:
    """A net of two wide layers, whose moments are kept in 8 bits, with small biases, whose are not."""

    def __init__(self, kind: Any, weight_decay: float = 0.1) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        config = OptimConfig(kind=kind, weight_decay=weight_decay)
        first, second = (list(self.model[index].parameters()) for index in (0, 2))
        self.optimizer = adamw(config, [(first, 1e-3), (second, 3e-3)])

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            (self.model(inputs) - inputs.roll(1, 1)).square().mean().backward()
            optimizer_step(self.optimizer, 1 / step)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_step_is_at_the_factor_of_every_groups_own_rate(kind: Any) -> None:
    """AdamW's first step moves a weight by the learning rate itself, whatever its gradient is."""
    slow, fast = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = adamw(OptimConfig(kind=kind, weight_decay=0.0), [([slow], 1e-3), ([fast], 4e-3)])
    for parameter in (slow, fast):
        parameter.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer_step(optimizer, 0.25)
    for parameter, rate in ((slow, 0.25e-3), (fast, 1e-3)):
        moved = 1 - parameter.detach()
        assert torch.allclose(moved, rate * torch.tensor([1.0, -1.0, 1.0]), rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_step_is_near_adamw_and_its_state_a_quarter(kind: str):
    plain, compact = Regression("adamw"), Regression(kind)
    before = plain.weights()
    for training in (plain, compact):
        training.train(1, 5)
    for name, start in before.items():
        moved, expected = compact.weights()[name] - start, plain.weights()[name] - start
        error = float((moved - expected).norm() / expected.norm())
        assert error < (0.03 if start.dim() > 1 else 1e-3), (name, error)  # 1 for a step that is not taken
        assert start.dim() == 1 or error > 1e-4, f"{name} is not kept in 8 bits"

    def held(training: Regression) -> int:
        """Bytes of state of the two wide weights, without the tables that all tensors share."""
        states = [training.optimizer.state[x] for x in training.model.parameters() if x.dim() > 1]
        named = [pair for state in states for pair in state.items() if "qmap" not in pair[0]]
        return sum(value.nbytes for _, value in named if isinstance(value, Tensor))

    assert 0.25 < held(compact) / held(plain) < 0.26  # 2 + 8/256 bytes for 8, and the step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_six_steps_are_three_and_a_checkpoint_and_three(kind: str, tmp_path: Path):
    straight = Regression(kind)
    straight.train(1, 6)
    first = Regression(kind)
    first.train(1, 3)
    groups = {"model": first.model.state_dict(), "optimizer": optimizer_tensors(first.optimizer)}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, groups, {}))
    second = Regression(kind)
    second.train(1, 1)  # what is there before is replaced
    second.model.load_state_dict(loaded.tensors["model"])
    restore_optimizer(second.optimizer, loaded.tensors["optimizer"])
    second.train(4, 6)
    for name, value in straight.weights().items():
        assert torch.equal(value, second.weights()[name]), name
    expected, found = optimizer_tensors(straight.optimizer), optimizer_tensors(second.optimizer)
    assert expected.keys() == found.keys() and int(found["0.step"]) == 6
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_the_state_of_another_kind_is_refused():
    plain, compact = Regression("adamw"), Regression("adamw8bit")
    for training, other in ((plain, compact), (compact, plain)):
        training.train(1, 1)
        with pytest.raises(UserError, match="The saved optimizer has .* state is expected, which has"):
            restore_optimizer(other.optimizer, optimizer_tensors(training.optimizer))


@pytest.mark.parametrize("word", ["optim.kind=adamw8bit", "cold_start.optim.kind=paged_adamw8bit"])
def test_a_missing_package_is_said_before_anything_is_loaded(word: str, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    monkeypatch.setattr(building, "build_environment", lambda *_: pytest.fail("this came first"))
    with pytest.raises(UserError, match="=(paged_)?adamw8bit needs the package bitsandbytes: `pip install"):
        build(tiny.config(word))
