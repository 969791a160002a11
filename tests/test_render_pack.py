"""Prompts of both sides from one function, and row n of a step being the same sampled token on both of them."""

import logging
from dataclasses import dataclass

import pytest
import tiny
import torch

from lopd_fast.batch import Rollout, Side
from lopd_fast.envs.base import Message, Task
from lopd_fast.errors import UserError
from lopd_fast.pack import fitting, micro_batches, pack_step
from lopd_fast.render import SLOT, Renderer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: an assistant turn after the last question shows its (empty) thinking, an earlier one does not.
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last and loop.last %}"
    "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content.lstrip('\n') + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# As Llama 3's: a BOS of its own, other marks, contents trimmed.
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|endoftext|>' + message['role'] + '\n\n' + "
    "message['content'] | trim + eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|endoftext|>assistant\n\n' }}{%- endif %}"
)
TEMPLATES = {"chatml": tiny.CHATML, "smollm2": SMOLLM2, "qwen3": QWEN3, "llama3": LLAMA3}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say ab."}]


@pytest.fixture(params=TEMPLATES)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return Renderer(tiny.tokenizer(TEMPLATES[request.param]))


def decode(renderer: Renderer, ids: list[int]) -> str:
    return str(renderer.tokenizer.decode(ids))


# --- prompts -----------------------------------------------------------------------------------------------------


def test_the_prompt_is_what_the_template_says(renderer: Renderer):
    ids, offset = renderer.prompt(MESSAGES)
    template = renderer.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids == template and offset == 0


def test_the_teachers_prompt_is_the_students_with_slots_in_the_first_user_message(renderer: Renderer):
    messages = [*MESSAGES, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "Again."}]
    student, _ = renderer.prompt(messages)
    teacher, offset = renderer.prompt(messages, 5)
    assert teacher[offset : offset + 5] == [renderer.pad_id] * 5
    text = decode(renderer, student)
    expected = text.replace("Say ab.", "Experience: @\n\nSay ab.")
    assert decode(renderer, teacher[:offset]) + "@" + decode(renderer, teacher[offset + 5 :]) == expected


def test_both_sides_have_one_bos_and_the_same_assistant_header():
    renderer = Renderer(tiny.tokenizer(LLAMA3))
    for latents in (0, 4):
        ids, _ = renderer.prompt(MESSAGES, latents)
        assert ids[0] == 1 and ids.count(1) == 1
        assert decode(renderer, ids).endswith("<|endoftext|>assistant\n\n")


def test_thinking_is_off_on_both_sides_or_on_neither():
    for options, header in (
        ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": True}, "assistant\n"),
        ({}, "assistant\n"),
    ):
        renderer = Renderer(tiny.tokenizer(QWEN3), options)
        texts = [decode(renderer, renderer.prompt(MESSAGES, latents)[0]) for latents in (0, 4)]
        assert all(text.endswith(header) for text in texts)
        assert decode(renderer, renderer.observation("next")).endswith(header)


def test_no_latents_give_the_same_ids_on_both_sides(renderer: Renderer):
    batch = pack_step([tiny.rollout(1, [1, 1], 1.0)], [0], renderer)
    assert torch.equal(batch.student.packed.ids, batch.teacher.packed.ids)
    assert batch.teacher.slots.numel() == 0


def test_sampled_ids_and_observation_are_the_rendered_conversation(renderer: Renderer):
    """prompt + action ids + observation ids, as a rollout grows, against one rendering of all of it."""
    action, observation = "look ab", "found <it>\nin two lines"
    end = renderer.turn_end
    grown = renderer.prompt(MESSAGES)[0] + renderer._ids(action) + [end] + renderer.observation(observation)
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": action},
        {"role": "user", "content": observation},
    ]
    assert grown == renderer.prompt(conversation)[0]


def test_actions_end_at_the_end_of_a_turn_or_of_a_text(renderer: Renderer):
    assert renderer.end_ids == {tiny.END}
    other = tiny.tokenizer()
    other.eos_token = "<|endoftext|>"  # a base model's end, with the template's own mark beside it
    assert Renderer(other).end_ids == {0, tiny.END} and Renderer(other).turn_end == tiny.END


def test_what_cannot_be_rendered_is_said():
    bare = tiny.tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        Renderer(bare)
    renderer = Renderer(tiny.tokenizer())
    with pytest.raises(UserError, match="needs a user message"):
        renderer.prompt(MESSAGES[:1], 3)
    with pytest.raises(UserError, match=f"holds the text {SLOT}"):
        renderer.prompt([{"role": "user", "content": f"Say {SLOT}."}], 3)


# --- packing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GivenPrompt(Renderer):
    """Prompts of given lengths: `student` ids, and with latents `extra` more of them after the slots."""

    student: tuple[int, ...] = (5, 2)
    extra: int = 0

    def prompt(self, messages: list[Message], num_latents: int = 0) -> tuple[list[int], int]:  # pyright: ignore
        more = [7] * self.extra if num_latents else []
        return [2] * num_latents + more + list(self.student), 0


def given(response: list[int], mask: list[int], reward: float = 1.0) -> Rollout:
    messages = [{"role": "user", "content": "x"}]
    return Rollout(Task("t", "x"), messages, response, [bool(mine) for mine in mask], reward)


def unpacked(side: Side) -> list[list[int]]:
    """The sequences of a side, in the order they were packed in: each is what its last token sees, itself included."""
    packed, mask = side.packed, side.packed.mask()
    last = [int((packed.runs == run).nonzero().max()) for run in packed.runs.unique().tolist()]
    return [packed.ids[mask[place]].tolist() for place in last]


def test_padding_by_the_end_id_is_not_supervised():
    """SmolLM2's pad id is its eos id: of [5,2 | 7,2] and [5,2 | 8,9,8,2] every token behind the bar is supervised."""
    renderer = GivenPrompt(tiny.tokenizer())
    assert renderer.pad_id == 2
    batch = pack_step([given([7, 2], [1, 1]), given([8, 9, 8, 2], [1, 1, 1, 1])], [0, 0], renderer)
    assert batch.student.packed.ids.tolist() == [5, 2, 7, 2, 8, 9, 8, 2]
    assert batch.student.packed.positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 5]
    assert batch.targets.tolist() == [7, 2, 8, 9, 8, 2]
    assert batch.student.rows.tolist() == [1, 2, 1, 4, 5, 6]


def test_of_several_turns_the_students_tokens_alone_are_supervised():
    renderer = GivenPrompt(tiny.tokenizer(), student=(5, 6))
    batch = pack_step([given([11, 12, 13, 14, 15], [1, 1, 0, 0, 1], 0.25)], [0], renderer)
    assert batch.targets.tolist() == [11, 12, 15]
    assert unpacked(batch.student) == unpacked(batch.teacher) == [[5, 6, 11, 12, 13, 14, 15]]
    assert batch.student.rows.tolist() == batch.teacher.rows.tolist() == [1, 2, 5]
    assert batch.advantages.tolist() == [-0.5] * 3


def test_row_n_is_the_same_token_on_both_sides(renderer: Renderer):
    rollouts = [
        tiny.rollout(1, [1, 1, 0, 1], 1.0),
        tiny.rollout(2, [1], 0.0),
        tiny.rollout(3, [1, 0, 0, 1, 1, 1], 0.5),
    ]
    counts = [4, 0, 9]
    batch = pack_step(rollouts, counts, renderer)
    assert batch.targets.tolist() == [
        token
        for item in rollouts
        for token, mine in zip(item.response_ids, item.student_mask, strict=True)
        if mine
    ]
    assert batch.advantages.tolist() == [1.0] * 3 + [-1.0] + [0.0] * 4
    for side, slots in ((batch.student, [0, 0, 0]), (batch.teacher, counts)):
        prompts = [renderer.prompt(item.messages, count) for item, count in zip(rollouts, slots, strict=True)]
        whole = [prompt + item.response_ids for (prompt, _), item in zip(prompts, rollouts, strict=True)]
        assert sorted(unpacked(side)) == sorted(whole)
        mask, rows, places = side.packed.mask(), iter(side.rows.tolist()), iter(side.slots.tolist())
        for (prompt, offset), count, sequence, item in zip(prompts, slots, whole, rollouts, strict=True):
            for place in range(count):
                seen = side.packed.ids[mask[next(places)]].tolist()
                assert seen == sequence[: offset + place + 1]
            for place, mine in enumerate(item.student_mask):
                if mine:  # the row sees the sequence up to the token before the one it predicts
                    assert side.packed.ids[mask[next(rows)]].tolist() == sequence[: len(prompt) + place]
        assert next(rows, None) is None and next(places, None) is None
    assert len(set(batch.teacher.slots.tolist())) == sum(counts)


def test_sampled_ids_stay_as_they_were_sampled():
    """a, b as two tokens, whose text is one token: the targets are the two."""
    renderer = Renderer(tiny.tokenizer())
    a, b, ab = (renderer._ids(text)[0] for text in ("a", "b", "ab"))
    assert renderer._ids(decode(renderer, [a, b])) == [ab]
    batch = pack_step([given([a, b, tiny.END], [1, 1, 1])], [3], renderer)
    assert batch.targets.tolist() == [a, b, tiny.END]
    for side in (batch.student, batch.teacher):
        assert unpacked(side)[0][-3:] == [a, b, tiny.END]


def test_ids_and_mask_that_do_not_align_raise():
    rollout = given([7, 8, 9], [1, 1, 1])
    rollout.student_mask.pop()
    with pytest.raises(UserError, match="task t has 3 response ids but a mask of 2"):
        pack_step([rollout], [0], Renderer(tiny.tokenizer()))


def test_a_completion_is_kept_whole_on_both_sides_or_dropped_with_a_message(caplog: pytest.LogCaptureFixture):
    """100 + 50 tokens for the student and 100 + 900 + 50 for the teacher, limit 512."""
    renderer = GivenPrompt(tiny.tokenizer(), student=tuple(range(3, 103)), extra=800)
    long = given([9] * 50, [1] * 50)
    with caplog.at_level(logging.WARNING):
        assert fitting([long, long], [100, 0], renderer, 512) == [1]
    assert (
        "dropped a rollout of task t: 1050 tokens" in caplog.text and "rollout.max_tokens=512" in caplog.text
    )
    assert fitting([long], [100], renderer, 1050) == [0] and fitting([long], [100], renderer, 1049) == []
    batch = pack_step([long], [100], renderer)
    assert batch.student.rows.tolist() == list(range(99, 149))
    assert batch.teacher.rows.tolist() == list(range(999, 1049))


def test_a_rollout_without_a_token_of_the_students_is_left_out():
    renderer = Renderer(tiny.tokenizer())
    assert fitting([given([7, 8], [0, 0]), given([], []), given([7], [1])], [0, 0, 0], renderer, 512) == [2]


def test_micro_batches_hold_every_rollout_once_within_the_budget():
    renderer = GivenPrompt(tiny.tokenizer())
    rollouts = [given([9] * length, [1] * length) for length in (5, 1, 30, 2, 5, 9)]
    groups = micro_batches(rollouts, 21, renderer)
    assert sorted(len(r.response_ids) for group in groups for r in group) == [1, 2, 5, 5, 9, 30]
    for group in groups:
        assert sum(2 + len(rollout.response_ids) for rollout in group) <= 21 or len(group) == 1
    assert len(groups) < len(rollouts) and micro_batches([], 21, renderer) == []
