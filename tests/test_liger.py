"""Liger's kernels on the backbone: where they are patched in, and what they leave alone. The kernels need a GPU."""

import sys

import pytest
import tiny
import torch

from lopd_fast import liger
from lopd_fast.backbone import Backbone, load_model, plain_copy
from lopd_fast.config import ModelConfig
from lopd_fast.liger import use_liger, uses_liger

pytest.importorskip("liger_kernel")


@pytest.fixture(autouse=True)
def architectures_as_they_were():
    from transformers.models.llama import modeling_llama
    from transformers.models.olmo3 import modeling_olmo3
    from transformers.models.qwen3 import modeling_qwen3

    modules = (modeling_llama, modeling_olmo3, modeling_qwen3)
    before = [(module, module.apply_rotary_pos_emb) for module in modules]
    yield
    for module, rotary in before:
        setattr(module, "apply_rotary_pos_emb", rotary)  # noqa: B010


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo3"])
def test_norms_mlps_and_rotary_are_patched_and_nothing_else(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liger, "DEVICES", ("cpu",))  # stands in for CUDA; nothing is run
    model = tiny.model(kind, tie=False)
    architecture = sys.modules[type(model).__module__]
    names, classes = [name for name, _ in model.named_parameters()], dict(vars(architecture))
    use_liger(model)

    assert uses_liger(model) and not uses_liger(tiny.model(kind))
    bound = {name: vars(part)["forward"] for name, part in model.named_modules() if "forward" in vars(part)}
    patched = {name.rsplit(".", 1)[-1]: forward.__func__.__qualname__ for name, forward in bound.items()}
    norms = {
        "olmo3": {"norm", "post_attention_layernorm", "post_feedforward_layernorm"},
        "llama": {"norm", "input_layernorm", "post_attention_layernorm"},
    }
    norms["qwen3"] = norms["llama"] | {"q_norm", "k_norm"}
    expected = dict.fromkeys(norms[kind], "LigerRMSNorm.forward") | {"mlp": "LigerSwiGLUMLP.forward"}
    assert patched == expected
    assert [name for name, _ in model.named_parameters()] == names

    changed = {name for name, value in classes.items() if vars(architecture)[name] is not value}
    assert changed == {"apply_rotary_pos_emb"}
    assert architecture.apply_rotary_pos_emb.on_device.__name__ == "liger_rotary_pos_emb"
    monkeypatch.setattr(liger, "DEVICES", ("cuda",))  # a CPU's tensors take the function that was there
    q, k, cos, sin = torch.randn(2, 1, 2, 3, 8).unbind() + tuple(torch.randn(2, 1, 3, 8))
    assert all(
        map(
            torch.equal,
            architecture.apply_rotary_pos_emb(q, k, cos, sin),
            classes["apply_rotary_pos_emb"](q, k, cos, sin),
        )
    )


def test_a_copy_is_patched_as_its_model_and_takes_adapters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liger, "DEVICES", ("cpu",))
    model = tiny.model()
    use_liger(model)
    copy = plain_copy(model, lambda: iter(model.state_dict().items()))
    assert uses_liger(copy) and "forward" in vars(copy.get_decoder().norm)
    backbone = Backbone(copy)
    backbone.add_adapter("student", tiny.config().student.lora)
    assert len(backbone.adapter_parameters("student")) == 2 * 7 * 2


def test_a_cpu_and_a_switch_leave_the_model_alone(tmp_path, monkeypatch: pytest.MonkeyPatch):
    folder = str(tiny.save_model(tmp_path))
    assert not uses_liger(load_model(ModelConfig(path=folder, device="cpu")))
    monkeypatch.setattr(liger, "DEVICES", ("cpu",))
    assert not uses_liger(load_model(ModelConfig(path=folder, device="cpu", liger_kernels=False)))
    assert uses_liger(load_model(ModelConfig(path=folder, device="cpu")))
