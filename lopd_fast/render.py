"""One function that renders a prompt, for the student and for the teacher alike.

The teacher's prompt is the student's with a slot for latent tokens at the head of the first user message. Both come
from the same messages through the same chat template with the same options, so thinking mode, BOS and the assistant
header cannot differ; with no latents the two are the same ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lopd_fast.envs.base import Message
from lopd_fast.errors import UserError

SLOT = "<lopd-experience-latents>"
SLOT_HEADER = f"Experience: {SLOT}\n\n"


@dataclass(frozen=True)
class Renderer:
    """Renders messages to ids. `template_options` go to the chat template of both sides (enable_thinking, ...)."""

    tokenizer: PreTrainedTokenizerBase
    template_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"The tokenizer at {self.tokenizer.name_or_path} has no chat template; use an instruct model or add a "
                "chat_template.jinja to its folder."
            )
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"The tokenizer at {self.tokenizer.name_or_path} has no end-of-text token (eos_token)."
            )

    def prompt(self, messages: Sequence[Message], num_latents: int = 0) -> tuple[list[int], int]:
        """Ids of the conversation up to the assistant header, and the offset of its latent slots.

        With `num_latents` > 0 the ids hold that many pad ids at the offset, for the latents to be spliced over.
        """
        if num_latents == 0:
            return self._ids(self._text(messages)), 0
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise UserError(
                "A conversation needs a user message for the latent tokens to stand in; it has none."
            )
        if any(SLOT in message["content"] for message in messages):
            raise UserError(
                f"A message holds the text {SLOT}, which marks the latent tokens' place; remove it."
            )
        marked = [dict(message) for message in messages]
        marked[first]["content"] = SLOT_HEADER + marked[first]["content"]
        before, _, after = self._text(marked).partition(SLOT)
        head = self._ids(before)
        return head + [self.pad_id] * num_latents + self._ids(after), len(head)

    def observation(self, content: str) -> list[int]:
        """Ids that follow a finished action: the observation as the next user turn, and the next assistant header.

        They are cut out of a rendered conversation, so the sampled ids before them are never rendered again; the
        action's own end is among those and not in here.
        """
        ids = self._after_action({"role": "user", "content": content})
        return ids[1:] if ids[0] == self.turn_end else ids

    @property
    def pad_id(self) -> int:
        """The id that fills padding and latent slots; what it means is never read."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.tokenizer.eos_token_id  # pyright: ignore[reportReturnType]

    @property
    def turn_end(self) -> int:
        """The id that ends an action: the end-of-turn marker of the chat template, else the tokenizer's end."""
        marker = self._after_action()[:1]
        special = self.tokenizer.all_special_ids
        return marker[0] if marker and marker[0] in special else self.tokenizer.eos_token_id  # pyright: ignore

    @property
    def end_ids(self) -> set[int]:
        """Ids at which sampling stops: the end of a turn and the tokenizer's end."""
        ends = (self.turn_end, self.tokenizer.eos_token_id)
        return {end for end in ends if isinstance(end, int)}

    def _after_action(self, *turns: Message) -> list[int]:
        """What the template puts behind an action, given the turns that follow it.

        An action is not rendered alike as the last turn and before another (Qwen3 shows the thinking of the last one),
        so this is cut behind the action's text, not by comparing two renderings.
        """
        action = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SLOT}]
        return self._ids(self._text([*action, *turns], generate=bool(turns)).partition(SLOT)[2])

    def _text(self, messages: Sequence[Message], generate: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
                list(messages), tokenize=False, add_generation_prompt=generate, **self.template_options
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"The chat template of {self.tokenizer.name_or_path} cannot render messages of {roles}: {error}."
            ) from None

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids  # pyright: ignore[reportReturnType]
