"""Packed sequences with shared starts: the layout, and that models compute what they compute for each alone."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lopd_fast import packed_forward, prefix_tree
from lopd_fast.packed_forward import packed_hidden, packing_of
from lopd_fast.prefix_tree import pack

SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config(**SHAPE, sliding_window=4, layer_types=LAYERS)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=4)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, sliding_window=4)),
}
CASES = [(kind, attention) for kind in MODELS for attention in ("sdpa", "eager")]
CASES.remove(("gemma2", "sdpa"))  # its soft-capped attention has no SDPA


def model_of(kind: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    made, config = MODELS[kind]
    return made._from_config(config, attn_implementation=attention).double().eval()


def some_sequences() -> list[list[int]]:
    """With a common start of every length, one inside another, two alike, and one that shares nothing."""
    draw = random.Random(0)
    base = [draw.randrange(3, 97) for _ in range(12)]
    sequences = [
        base[:cut] + [draw.randrange(3, 97) for _ in range(draw.choice((1, 4)))] for cut in (3, 9, 9, 12)
    ]
    return [*sequences, base, base + [5], base + [5], base[:7], [90, *base]]


def alone(model: PreTrainedModel, sequences: list[list[int]]) -> list[Tensor]:
    body = model.get_decoder()
    return [body(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in sequences]


def test_common_starts_are_held_once():
    packed, paths = pack([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4, 5], [1, 2, 9]])
    assert packed.ids.tolist() == [1, 2, 3, 4, 5, 9] and packed.positions.tolist() == [0, 1, 2, 3, 4, 2]
    assert [path.tolist() for path in paths] == [[0, 1, 2, 3], [0, 1, 5], [0, 1, 2, 3, 4], [0, 1, 5]]
    assert packed.mask()[5].tolist() == [True, True, False, False, False, True]
    whole, paths = pack([[1, 2, 3], [1, 2]], share=False)
    assert whole.ids.tolist() == [1, 2, 3, 1, 2] and paths[1].tolist() == [3, 4]
    assert whole.mask()[4].tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_sees_its_own_sequence_alone(window: int | None):
    sequences = some_sequences()
    packed, paths = pack(sequences)
    assert packed.ids.numel() == len({tuple(ids[: end + 1]) for ids in sequences for end in range(len(ids))})
    mask = packed.mask(window)
    for ids, path in zip(sequences, paths, strict=True):
        assert packed.ids[path].tolist() == ids
        for end, place in enumerate(path.tolist()):
            first = 0 if window is None else max(0, end + 1 - window)
            assert mask[place].nonzero()[:, 0].tolist() == sorted(path[first : end + 1].tolist())


def test_a_slot_is_never_shared():
    packed, paths = pack([[1, 0, 7], [1, 0, 7]], keys=[[1, -1, 7], [1, -2, 7]])
    assert packed.ids.numel() == 5 and not set(paths[0][1:].tolist()) & set(paths[1][1:].tolist())


def test_long_rows_stand_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_tree, "MASKED_TOKENS", 5)
    assert pack([[1, 2], [1, 2, 3]])[0].ids.tolist() == [1, 2, 3]
    assert pack([[1, 2], [1, 2, 3, 4]])[0].ids.tolist() == [1, 2, 1, 2, 3, 4]


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_states_are_those_of_each_sequence_alone(kind: str, attention: str, monkeypatch: pytest.MonkeyPatch):
    model, sequences = model_of(kind, attention), some_sequences()
    expected = torch.cat(alone(model, sequences))
    assert packing_of(model) == "tree"
    for share in (True, False):
        packed, paths = pack(sequences, share=share)
        torch.testing.assert_close(
            packed_hidden(model, packed)[torch.cat(paths)], expected, rtol=1e-6, atol=1e-6
        )
    packed, paths = pack(sequences, share=False)
    embeddings = model.get_input_embeddings()(packed.ids)
    for way in ("rows", "single"):
        monkeypatch.setattr(packed_forward, "packing_of", lambda _, way=way: way)
        for given in (None, embeddings):
            found = packed_hidden(model, packed, given)[torch.cat(paths)]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    monkeypatch.undo()
    monkeypatch.setattr(packed_forward, "MASKED_TOKENS", 10)  # too long for a mask: one by one
    monkeypatch.setattr(type(packed), "mask", lambda *_: pytest.fail("a mask was built"))
    torch.testing.assert_close(packed_hidden(model, packed)[torch.cat(paths)], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "olmo3"])
def test_gradients_are_the_sums_over_the_sequences(kind: str):
    model, sequences = model_of(kind), some_sequences()
    weight = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    pull = torch.randn(
        sum(map(len, sequences)), 32, generator=torch.Generator().manual_seed(1), dtype=torch.double
    )
    (expected,) = torch.autograd.grad((torch.cat(alone(model, sequences)) * pull).sum(), weight)
    packed, paths = pack(sequences)
    (found,) = torch.autograd.grad((packed_hidden(model, packed)[torch.cat(paths)] * pull).sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)  # norms are taken in fp32


def test_models_that_cannot_take_a_mask_are_known():
    from transformers import MambaConfig, MambaForCausalLM

    small = MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert packing_of(MambaForCausalLM(small)) == "single"
    model = model_of("llama")
    model.config._attn_implementation = "flash_attention_2"
    assert packing_of(model) == "rows"
