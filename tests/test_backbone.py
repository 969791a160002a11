"""One frozen model in every role: which adapter is on, what learns, what a checkpointed backward recomputes, heads."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.utils.checkpoint
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from lopd_fast.backbone import Backbone, head_of, load_model, load_tokenizer
from lopd_fast.build import Parts
from lopd_fast.config import LoraConfig, ModelConfig, StudentConfig
from lopd_fast.errors import UserError
from lopd_fast.pack import pack_step
from lopd_fast.render import SLOT_HEADER
from lopd_fast.student import Student
from lopd_fast.teacher import splice, teacher_hidden
from lopd_fast.trainer import Trainer

ROLES = ("student", "encoder", "anchor")


def stirred_parts(*words: str, kind: str = "llama", tie: bool = True) -> Parts:
    """Parts whose three adapters all differ, none of them being zero."""
    parts = tiny.parts(*words, kind=kind, tie=tie)
    parts.composer.freeze_anchor()
    for seed, role in enumerate(ROLES):
        tiny.stir([value for _, value in parts.backbone.adapter_parameters(role)], seed)
    return parts


def some_ids(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 275, (rows, length), generator=torch.Generator().manual_seed(3))


def learning_names(parts: Parts) -> list[str]:
    return [name for name, value in parts.backbone.named_parameters() if value.requires_grad]


# --- roles -------------------------------------------------------------------------------------------------------


def test_each_role_is_its_own_adapter_and_the_teacher_none():
    parts = stirred_parts()
    ids = some_ids()
    plain = tiny.model()
    expected = {"teacher": plain.get_decoder()(ids).last_hidden_state}
    for role in ROLES:
        merged = tiny.model()
        merged.load_state_dict(dict(parts.backbone.merged_state(role)))
        expected[role] = merged.get_decoder()(ids).last_hidden_state
    for role in ("student", "teacher", "encoder", "anchor", "teacher", "student"):
        with parts.backbone.role(role):
            found = parts.backbone.hidden(tiny.packed(ids)).view_as(expected[role])
            torch.testing.assert_close(found, expected[role], rtol=1e-4, atol=1e-5)
    apart = [float((expected[a] - expected[b]).abs().max()) for a in expected for b in expected if a < b]
    assert min(apart) > 0.01


def test_what_learns_never_changes_with_the_role():
    parts = stirred_parts()
    before = learning_names(parts)
    assert {name.split(".")[-2] for name in before} == {
        "student",
        "encoder",
    }  # the backbone and phi_0 never learn
    for role in ("student", "anchor", "teacher", "encoder"):
        with parts.backbone.role(role):
            assert learning_names(parts) == before
        assert learning_names(parts) == before


def test_roles_nest_and_come_back_after_an_exception():
    backbone = stirred_parts().backbone
    with pytest.raises(RuntimeError, match="stop"):
        with backbone.role("student"), backbone.role("encoder"):
            raise RuntimeError("stop")
    assert backbone.role_name == "teacher"
    with backbone.role("student"):
        with backbone.role("teacher"):
            pass
        assert backbone.role_name == "student"
    with pytest.raises(ValueError, match="no adapter 'tutor'.*student.*encoder"):
        with backbone.role("tutor"):
            pass


def test_a_teacher_pass_leaves_modes_and_role_alone_even_when_it_fails(monkeypatch: pytest.MonkeyPatch):
    parts = stirred_parts("model.gradient_checkpointing=true")
    batch = pack_step([tiny.rollout(1, [1, 1], 1.0)], [3], parts.renderer)
    latents = [torch.randn(3, 32)]

    def modes() -> list[bool]:
        return [module.training for module in parts.backbone.modules()]

    before = modes()
    teacher_hidden(parts.backbone, batch.teacher, latents)
    assert modes() == before

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    layers: Any = parts.backbone.model.get_decoder().layers
    monkeypatch.setattr(layers[1], "forward", fail)
    with parts.backbone.role("student"), pytest.raises(RuntimeError, match="out of memory"):
        teacher_hidden(parts.backbone, batch.teacher, latents)
    assert modes() == before and parts.backbone.role_name == "teacher"


def test_a_saved_adapter_comes_back_and_a_wrong_one_is_refused():
    parts = stirred_parts()
    saved = tiny.copies(parts.backbone.adapter_state("student"))
    others = tiny.copies(parts.backbone.adapter_state("encoder"))
    tiny.stir([value for _, value in parts.student.trainable()], seed=8)
    parts.backbone.load_adapter_state("student", saved)
    for now, then in (
        (parts.backbone.adapter_state("student"), saved),
        (parts.backbone.adapter_state("encoder"), others),
    ):
        assert all(torch.equal(now[name], then[name]) for name in then)
    assert {name.split(".")[-2] for name in learning_names(parts)} == {"student", "encoder"}
    saved.pop(next(iter(saved)))
    with pytest.raises(UserError, match="does not fit 'student': 1 tensors are missing"):
        parts.backbone.load_adapter_state("student", saved)


def test_adapters_of_a_half_precision_model_learn_in_fp32():
    backbone = Backbone(tiny.model(dtype=torch.bfloat16))
    backbone.add_adapter("student", LoraConfig())
    assert {value.dtype for _, value in backbone.adapter_parameters("student")} == {torch.float32}
    with backbone.role("student"):
        ids = some_ids()
        assert backbone.hidden(tiny.packed(ids)).dtype == torch.bfloat16


def test_a_half_precision_policy_samples_with_its_adapter_unmerged():
    backbone = Backbone(tiny.model(dtype=torch.bfloat16))
    student = Student(backbone, StudentConfig(), merge_for_rollout=False)
    tiny.stir([value for _, value in student.trainable()], size=0.05)
    ids = some_ids()
    with student.policy() as policy, torch.no_grad():
        sampled = policy.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)  # pyright: ignore[reportCallIssue]
        logits = policy(ids).logits
    assert isinstance(sampled, Tensor) and sampled.shape == (2, 9) and logits.dtype == torch.bfloat16
    assert (
        float((logits - tiny.model(dtype=torch.bfloat16)(ids).logits).abs().max()) > 0.1
    )  # the adapter is on


def test_a_half_precision_adapter_keeps_no_fp32_copy_of_its_input(monkeypatch: pytest.MonkeyPatch):
    """Such a copy of every input would be the largest part of a block's memory."""
    backbone = Backbone(tiny.model(dtype=torch.bfloat16))
    backbone.add_adapter("student", LoraConfig())

    def kept() -> int:
        """fp32 numbers as wide as the model, kept for the backward."""
        found: dict[int, Tensor] = {}

        def note(x: Tensor) -> Tensor:
            if x.dtype == torch.float32 and x.shape[-2:] == (14, 32):
                found[x.untyped_storage().data_ptr()] = x
            return x

        with backbone.role("student"), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            backbone.hidden(tiny.packed(some_ids()))
        return len(found)

    own = kept()
    monkeypatch.setattr(backbone, "precision", nullcontext)
    for layer in backbone._lora_layers:
        layer.cast_input_dtype_enabled = True  # as peft does it by itself
    assert (
        kept() >= own + 2 * 3
    )  # in each of two blocks: of the attention, of its output, of the feed-forward


# --- gradient checkpointing --------------------------------------------------------------------------------------


def step_gradients(*words: str) -> dict[str, Tensor]:
    parts = stirred_parts("objective.beta_init=0.5", *words)
    e = tiny.experiences()
    rollouts = [tiny.rollout(1, [1, 1, 1], 1.0, e[:2]), tiny.rollout(2, [1, 0, 1], 0.0, e[1:3])]
    Trainer(parts, []).backward(rollouts)
    return {name: value.grad for name, value in tiny.learning(parts).items() if value.grad is not None}


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_checkpointed_gradients_are_those_of_the_role_of_the_forward(
    mode: str, monkeypatch: pytest.MonkeyPatch
):
    """Student, encoder and teacher segments are all recomputed after the role has moved on."""
    expected = step_gradients(f"student.mode={mode}")
    segments = []
    checkpoint = torch.utils.checkpoint.checkpoint

    def counted(*args: object, **kwargs: object) -> object:
        segments.append(kwargs.get("use_reentrant"))
        return checkpoint(*args, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]

    for module in list(sys.modules.values()):  # transformers holds the function under more than one name
        if getattr(module, "checkpoint", None) is checkpoint:
            monkeypatch.setattr(module, "checkpoint", counted)
    found = step_gradients("model.gradient_checkpointing=true", f"student.mode={mode}")
    assert len(segments) >= 3 * 2 and set(segments) == {False}  # 3 roles of 2 layers, none of them re-entrant
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float(gradient.norm()) > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8, msg=name)


def test_latents_get_their_gradient_through_a_checkpointed_teacher():
    """The teacher has no weight that learns, and its word embeddings are made of frozen ones."""
    gradients = []
    for words in ([], ["model.gradient_checkpointing=true"]):
        parts = stirred_parts(*words)
        batch = pack_step([tiny.rollout(1, [1, 1], 1.0), tiny.rollout(2, [1], 1.0)], [3, 3], parts.renderer)
        latents = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        hidden = teacher_hidden(parts.backbone, batch.teacher, [latents[:3], latents[3:]])
        with parts.backbone.role("student"):
            hidden.square().sum().backward()
        assert latents.grad is not None and float(latents.grad.norm()) > 0
        gradients.append(latents.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


# --- splicing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_word_embeddings_as_latents_are_those_words(kind: str):
    """Latents that are the embeddings of known tokens give the logits of the plain token path, padded or not."""
    parts = stirred_parts(kind=kind)
    embed = tiny.model(kind).get_input_embeddings()
    words = [torch.tensor([70, 80, 90]), torch.tensor([], dtype=torch.int64), torch.tensor([100] * 6)]
    rollouts = [tiny.rollout(n, [1] * (2 * n), 1.0) for n in (1, 2, 3)]
    batch = pack_step(rollouts, [len(ids) for ids in words], parts.renderer)
    hidden = teacher_hidden(parts.backbone, batch.teacher, [embed(ids) for ids in words])
    logits = F.linear(hidden, parts.backbone.head.weight)

    expected = []
    text_of, ids_of = parts.renderer._text, parts.renderer._ids
    for rollout, ids in zip(rollouts, words, strict=True):
        messages = [dict(message) for message in rollout.messages]
        messages[1]["content"] = (SLOT_HEADER if len(ids) else "") + messages[1]["content"]
        before, _, after = text_of(messages).partition(SLOT_HEADER[len("Experience: ") : -2])
        whole = torch.tensor([ids_of(before) + ids.tolist() + ids_of(after) + rollout.response_ids])
        expected.append(tiny.model(kind)(whole).logits[0, -len(rollout.response_ids) - 1 : -1])
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_splice_counts_and_leaves_its_inputs_alone():
    embeddings, slots = torch.zeros(2, 3, 4), torch.tensor([1, 5])
    latents = torch.arange(8.0).view(2, 4).requires_grad_()
    spliced = splice(embeddings, slots, latents)
    assert spliced[0, 1].tolist() == [0, 1, 2, 3] and spliced[1, 2].tolist() == [4, 5, 6, 7]
    assert float(spliced.sum()) == 28 and float(embeddings.sum()) == 0
    spliced.sum().backward()
    assert latents.grad is not None and latents.grad.tolist() == [[1.0] * 4] * 2
    with pytest.raises(ValueError, match="2 latents were given for 1 slots"):
        splice(embeddings, slots[:1], latents)


# --- heads -------------------------------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    initializer_range=0.5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)


def cohere() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))  # pyright: ignore[reportArgumentType]


def granite() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))  # pyright: ignore[reportArgumentType]


def gemma() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0))  # pyright: ignore[reportArgumentType]


def biased() -> PreTrainedModel:
    model = tiny.model(tie=False)
    head = nn.Linear(32, tiny.VOCABULARY)
    model.set_output_embeddings(head)
    return model


@pytest.mark.parametrize("make", [tiny.model, cohere, granite, gemma, biased])
def test_the_head_gives_the_logits_of_the_model(make):
    model = make().eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    head = head_of(model)
    logits = head.logit_scale * F.linear(model.get_decoder()(ids).last_hidden_state, head.weight, head.bias)
    if head.logit_softcap is not None:
        logits = head.logit_softcap * torch.tanh(logits / head.logit_softcap)
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-5, atol=1e-6)


def test_an_adapter_on_the_head_is_refused_by_name():
    model = tiny.model()
    inject_adapter_in_model(PeftLoraConfig(target_modules=["lm_head"]), model)
    with pytest.raises(UserError, match="lora.*Linear.*take the adapter off lm_head"):
        head_of(model)


def test_a_model_without_the_projections_is_refused():
    backbone = Backbone(tiny.model())
    layers: Any = backbone.model.get_decoder().layers
    for layer in layers:
        for part in (layer.self_attn, layer.mlp):
            for name, _ in list(part.named_children()):
                delattr(part, name)
    with pytest.raises(UserError, match="LlamaForCausalLM has none of the projections q_proj"):
        backbone.add_adapter("student", LoraConfig())


def test_no_folder_and_no_model_in_it_are_said(tmp_path: Path):
    with pytest.raises(UserError, match="set model.path"):
        load_model(ModelConfig())
    with pytest.raises(UserError, match="no config.json in it"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


# --- the student that is deployed --------------------------------------------------------------------------------

LOAD = """
import sys
sys.modules["lopd_fast"] = sys.modules["peft"] = None  # importing either is an error from here on
import torch
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected = load_file(folder / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tie = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    error = (model(expected["ids"]).logits.float() - expected["logits"]).abs().max() / expected["logits"].abs().max()
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    print(folder.name, model.dtype, tie, float(error), repr(ids))
"""


def test_a_saved_student_loads_by_transformers_alone(tmp_path: Path):
    ids = some_ids()
    for name, words, tie in [
        ("full", ["student.mode=full"], True),
        ("lora", [], True),
        ("untied", [], False),
    ]:
        parts = stirred_parts(*words, tie=tie)
        tiny.stir([value for _, value in parts.student.trainable()], seed=3, size=0.05)
        side = pack_step([tiny.rollout(1, [1], 1.0)], [0], parts.renderer).student
        side.packed, side.rows = tiny.packed(ids), torch.arange(ids.numel())
        with torch.no_grad():
            logits = F.linear(parts.student.hidden(side), parts.student.head.weight).view(*ids.shape, -1)
        parts.student.save(tmp_path / name, parts.renderer.tokenizer)
        save_file({"ids": ids, "logits": logits}, tmp_path / name / "expected.safetensors")
        with (
            parts.student.policy() as policy,
            torch.no_grad(),
        ):  # what rollouts are sampled from is the same model
            torch.testing.assert_close(policy(ids).logits, logits, rtol=1e-4, atol=1e-4)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    rows = [line.split(" ", 4) for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows] == [
        ["full", "torch.float32", "True"],
        ["lora", "torch.float32", "True"],
        ["untied", "torch.float32", "False"],
    ], done.stderr
    assert all(float(row[3]) < 1e-5 and "<|im_start|>user" in row[4] for row in rows), rows


def test_a_half_precision_student_is_saved_merged_in_its_own_dtype(tmp_path: Path):
    backbone = Backbone(tiny.model(dtype=torch.bfloat16))
    backbone.add_adapter("student", LoraConfig(rank=2, alpha=4))
    tiny.stir([value for _, value in backbone.adapter_parameters("student")], seed=1, size=0.05)
    weights = dict(backbone.merged_state("student"))
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    merged = tiny.model(dtype=torch.bfloat16)
    merged.load_state_dict(weights)
    ids = some_ids()
    with backbone.role("student"):
        expected = backbone.hidden(tiny.packed(ids)).float().view(*ids.shape, -1)
    found = merged.get_decoder()(ids).last_hidden_state.float()
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert (
        float((tiny.model().get_decoder()(ids).last_hidden_state - expected).norm() / expected.norm()) > 0.2
    )


def test_the_policy_follows_every_step():
    parts = stirred_parts()
    ids = some_ids()
    seen = []
    for _ in range(2):
        with parts.student.policy() as policy, torch.no_grad():
            seen.append(policy(ids).logits)
        with parts.backbone.role("student"), torch.no_grad():
            torch.testing.assert_close(parts.backbone.model(ids).logits, seen[-1], rtol=1e-4, atol=1e-4)
        tiny.stir([value for _, value in parts.student.trainable()], seed=4)
    assert float((seen[0] - seen[1]).abs().max()) > 0.01


def test_a_full_student_learns_apart_from_the_backbone():
    parts = tiny.parts("student.mode=full")
    before = tiny.copies(dict(parts.backbone.model.named_parameters()))
    tiny.stir([value for _, value in parts.student.trainable()], seed=1)
    after = dict(parts.backbone.model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    state = tiny.copies(parts.student.state())
    other = tiny.parts("student.mode=full")
    other.student.load(state)
    assert all(torch.equal(other.student.state()[name], state[name]) for name in state)
