"""Checkpoints in host memory: what is moved, that gradients are the same bits, and where it is refused."""

import pytest
import tiny
import torch
from test_step import gradients, moved_parts, ragged_rollouts, trainer_of
from torch import nn

from lopd_fast import activation_offload
from lopd_fast.activation_offload import offloaded
from lopd_fast.backbone import Backbone
from lopd_fast.errors import UserError


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_gradients_are_the_same_bits(mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)
    moved, to_host = [], activation_offload.to_host
    monkeypatch.setattr(activation_offload, "to_host", lambda x: moved.append(tuple(x.shape)) or to_host(x))
    parts = moved_parts(
        f"student.mode={mode}", "model.gradient_checkpointing=true", "objective.beta_init=0.7"
    )
    trainer = trainer_of(parts)
    trainer.backward(ragged_rollouts())
    expected = gradients(parts)
    assert not moved

    parts.backbone.activation_offload = True
    trainer.backward(ragged_rollouts())
    found = gradients(parts)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    wide = [shape for shape in moved if shape[-1] == 32]
    assert len(wide) >= 3 * 2  # encoder, teacher and student each keep the inputs of two blocks there


def test_parameters_small_tensors_and_constants_stay():
    weight = nn.Parameter(torch.randn(600, 600))  # 1.4 MB
    x = torch.randn(600, 600).requires_grad_()
    moved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        to_host = activation_offload.to_host
        patch.setattr(activation_offload, "to_host", lambda x: moved.append(x.data_ptr()) or to_host(x))
        with offloaded():
            y = (x * weight) * torch.randn(600, 600)  # a constant
            z = y[:2] * y[2:4]
        z.sum().backward()
    assert moved == [x.data_ptr()]
    del weight


@pytest.mark.parametrize(
    ("checkpointing", "device", "said"),
    [(True, "cpu", "this run is on a CPU"), (False, "meta", "gradient_checkpointing=true too")],
)
def test_refused_where_it_makes_no_sense(checkpointing: bool, device: str, said: str):
    with pytest.raises(UserError, match=said):
        Backbone(tiny.model().to(device), checkpointing, activation_offload=True)  # pyright: ignore
