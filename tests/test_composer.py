"""Latents of experiences: the same in any batch, encoded once where they are asked for twice; and their anchor."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from lopd_fast.backbone import Backbone
from lopd_fast.bank import Experience
from lopd_fast.composer import Composer
from lopd_fast.evaluation import teacher_gap
from lopd_fast.pack import pack_step
from lopd_fast.prefix_tree import Packed
from lopd_fast.teacher import teacher_hidden


def composer_of(*words: str, kind: str = "llama") -> Composer:
    """A composer whose encoder LoRA is not zero."""
    parts = tiny.parts(*words, kind=kind)
    tiny.stir([value for _, value in parts.backbone.adapter_parameters("encoder")], seed=5, size=0.2)
    return parts.composer


def requests() -> list[tuple[str, list[Experience]]]:
    e = tiny.experiences()
    return [
        ("Say one.", [e[2], e[0]]),
        ("Say two.", []),
        ("Say one.", [e[0], e[3], e[2]]),
        ("Say two.", [e[0]]),
    ]


class Counter:
    """Counts what the encoder reads."""

    def __init__(self, backbone: Backbone) -> None:
        self.lengths: list[int] = []
        inner = backbone.hidden

        def hidden(packed: Packed) -> Tensor:
            ends = torch.zeros(len(packed.limits), dtype=torch.int64)
            self.lengths += ends.scatter_reduce(0, packed.runs, packed.positions + 1, "amax").tolist()
            return inner(packed)

        backbone.hidden = hidden  # pyright: ignore[reportAttributeAccessIssue]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_latents_are_the_same_alone_and_in_any_batch(kind: str):
    whole = composer_of(kind=kind)
    together = whole(requests())
    assert [latents.shape for latents in together] == [(6, 32), (0, 32), (9, 32), (3, 32)]
    for index, request in enumerate(requests()):
        assert_same(whole([request]), [together[index]])
    assert_same(composer_of("composer.encoder_batch_tokens=1", kind=kind)(requests()), together)
    assert_same(composer_of("composer.encoder_batch_tokens=150", kind=kind)(requests()), together)
    assert_same(whole(requests()[::-1]), together[::-1])


def test_latents_stand_in_the_order_of_retrieval_and_depend_on_task_and_trace():
    composer = composer_of()
    (two, _, three, other) = composer(requests())
    assert_same([two[:3], two[3:]], [three[6:], three[:3]])
    assert float((two[3:] - other).abs().max()) > 1e-3  # the same experience for another task
    assert float((two[3:] - two[:3]).abs().max()) > 1e-3


def test_what_is_asked_for_twice_is_encoded_once_and_learns_from_both():
    composer = composer_of()
    counter = Counter(composer.backbone)
    latents = composer(requests())
    assert len(counter.lengths) == 4  # of the 6 experiences, 4 pairs of task and experience are distinct
    (latents[0][3:].sum() + 2 * latents[2][:3].sum()).backward()
    gradient = composer.qformer.latents.grad
    composer.qformer.latents.grad = None
    (3 * composer([requests()[0]])[0][3:].sum()).backward()
    assert gradient is not None and composer.qformer.latents.grad is not None
    torch.testing.assert_close(gradient, composer.qformer.latents.grad, rtol=1e-4, atol=1e-5)


def test_no_experience_at_all():
    composer = composer_of()
    counter = Counter(composer.backbone)
    assert [latents.shape for latents in composer([("a", []), ("b", [])])] == [(0, 32), (0, 32)]
    assert composer([]) == [] and counter.lengths == []


def test_a_long_trace_loses_its_end_and_the_task_is_kept():
    limit = 70
    composer = composer_of(f"composer.max_memory_tokens={limit}")
    counter = Counter(composer.backbone)
    task = "Say it."
    long = Experience("x", "t", "look ab " * 40, 1.0)
    head = len(composer.tokenizer(f"Task to solve:\n{task}\n\nReference past trajectory:\n").input_ids)
    assert head < limit
    first = composer([(task, [long])])
    assert counter.lengths == [limit]
    assert_same(composer([(task, [replace(long, trace=long.trace + "and more")])]), first)
    assert float((composer([("Say so.", [long])])[0] - first[0]).abs().max()) > 1e-3


def test_the_encoder_reads_with_its_own_adapter_alone():
    parts = tiny.parts()
    before = parts.composer(requests())
    tiny.stir([value for _, value in parts.student.trainable()], size=0.5)
    with parts.backbone.role("student"):
        assert all(torch.equal(*pair) for pair in zip(parts.composer(requests()), before, strict=True))
        assert parts.backbone.role_name == "student"
    tiny.stir([value for _, value in parts.backbone.adapter_parameters("encoder")], size=0.5)
    assert float((parts.composer(requests())[0] - before[0]).abs().max()) > 1e-3


def test_heads_are_the_backbones_unless_given():
    assert composer_of().qformer.heads == 4
    assert composer_of("composer.heads=2").qformer.heads == 2
    with pytest.raises(ValueError, match="dim 32 is not divisible by heads 5"):
        composer_of("composer.heads=5")


# --- the anchor --------------------------------------------------------------------------------------------------


def test_the_anchor_is_the_composer_of_then():
    composer = composer_of()
    composer.freeze_anchor()
    then = composer(requests())
    assert_same(composer.anchor(requests()), then)
    phi = [value for part in composer.trainable().values() for _, value in part]
    tiny.stir(phi, seed=2)
    assert float((composer(requests())[0] - then[0]).abs().max()) > 0.01
    assert_same(composer.anchor(requests()), then)
    assert not any(latents.requires_grad for latents in composer.anchor(requests()))

    composer.freeze_anchor()  # again: phi_0 is now another
    assert_same(composer.anchor(requests()), composer(requests()))


def test_the_anchor_is_computed_once_for_each_task_and_experience():
    composer = composer_of()
    composer.freeze_anchor()
    counter = Counter(composer.backbone)
    first = composer.anchor(requests()[:2])
    assert len(counter.lengths) == 2
    again = composer.anchor(requests())
    assert len(counter.lengths) == 4  # two more pairs are new
    assert torch.equal(first[0], again[0])
    composer.anchor(requests())
    assert len(counter.lengths) == 4

    resumed = composer_of()
    resumed.load(composer.state())
    for latents, before in zip(resumed.anchor(requests()), again, strict=True):
        assert torch.equal(latents, before)  # the same bits, whatever the pairs were first asked for with


def test_the_anchors_cache_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch):
    composer = composer_of()
    composer.freeze_anchor()
    first = composer.anchor(requests())
    one = next(iter(composer._anchor_cache.values())).nbytes
    monkeypatch.setattr("lopd_fast.composer.ANCHOR_CACHE_BYTES", 2 * one)
    counter = Counter(composer.backbone)
    kept = list(composer._anchor_cache)[2:]
    assert_same(composer.anchor(requests()), first)
    assert counter.lengths == [] and list(composer._anchor_cache) == kept
    assert_same(composer.anchor(requests()), first)
    assert len(counter.lengths) == 2 and list(composer._anchor_cache) != kept


def test_state_and_load_bring_back_phi_and_its_anchor():
    composer = composer_of()
    composer.freeze_anchor()
    tiny.stir([value for part in composer.trainable().values() for _, value in part], seed=2)
    state = tiny.copies(composer.state())
    assert {name.split("/")[0] for name in state} == {"encoder", "qformer", "anchor", "anchor_qformer"}

    other = composer_of()
    other.freeze_anchor()
    other.anchor(requests())  # what its cache holds is out of date after loading
    fresh = composer_of()  # has no anchor yet
    for loaded in (other, fresh):
        loaded.load(state)
        assert all(torch.equal(loaded.state()[name], state[name]) for name in state)
        assert_same(loaded(requests()), composer(requests()))
        assert_same(loaded.anchor(requests()), composer.anchor(requests()))
        learning = [name for name, value in loaded.backbone.named_parameters() if value.requires_grad]
        assert learning and not any(".anchor." in name for name in learning)


# --- two teachers apart ------------------------------------------------------------------------------------------


def test_the_gap_of_two_teachers_is_their_divergence():
    parts = tiny.parts()
    e = tiny.experiences()
    rollouts = [tiny.rollout(1, [1, 0, 1], 1.0), tiny.rollout(2, [1, 1], 0.0)]
    right, wrong = [[e[0], e[1]], [e[2]]], [[e[3]], []]
    logits = []
    for found in (right, wrong):
        latents = parts.composer([(r.task.text, items) for r, items in zip(rollouts, found, strict=True)])
        batch = pack_step(rollouts, [len(latent) for latent in latents], parts.renderer)
        hidden = teacher_hidden(parts.backbone, batch.teacher, latents)
        logits.append(F.linear(hidden, parts.backbone.head.weight).log_softmax(-1))
    exact = float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())

    def gap(positive: list[list[Experience]], negative: list[list[Experience]], k: int) -> float:
        backbone, composer, renderer = parts.backbone, parts.composer, parts.renderer
        return teacher_gap(backbone, composer, renderer, rollouts, positive, negative, k=k)

    assert gap(right, wrong, k=1000) == pytest.approx(exact, rel=1e-4) and exact > 1e-3
    assert 0 < gap(right, wrong, k=5) < exact
    assert abs(gap(right, right, k=256)) < 1e-6
