"""The default rollout engine: transformers' generate, batched over episodes, one turn at a time.

A teacher is rolled out by the same code: its latents are spliced into the embeddings of its prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from lopd_fast.backbone import Backbone
from lopd_fast.rollout.episodes import Episodes, Running
from lopd_fast.rollout.sampling import NucleusOfTopK, OwnDraws, Sampling
from lopd_fast.student import Student
from lopd_fast.teacher import splice


class HFRollout(Episodes):
    """Rolls episodes out with a transformers model."""

    def policy(self, student: Student) -> AbstractContextManager[PreTrainedModel]:
        """The model to sample from, as `Student.policy` gives it."""
        return student.policy()

    @contextmanager
    def base(self, backbone: Backbone) -> Iterator[PreTrainedModel]:
        """The backbone itself, its adapters off."""
        with backbone.policy() as model:
            yield model

    @contextmanager
    def _sampling(self, model: PreTrainedModel, seed: int) -> Iterator[None]:
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices), _inference(model):
            torch.manual_seed(seed)
            yield

    def _generate(
        self, model: PreTrainedModel, batch: Sequence[Running], sampling: Sampling, budget: int
    ) -> list[list[int]]:
        """Through left-padded ids, or embeddings where latents are spliced in."""
        longest = max(len(item.ids) for item in batch)
        ids = torch.full((len(batch), longest), self.renderer.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        slots: list[int] = []
        for row, item in enumerate(batch):
            padding = longest - len(item.ids)
            ids[row, padding:] = torch.tensor(item.ids)
            mask[row, padding:] = 1
            if item.latents is not None:
                first = row * longest + padding + item.slot
                slots += range(first, first + item.latents.shape[0])
        ids, mask = ids.to(model.device), mask.to(model.device)
        own = [(item.own_seed, len(item.rollout.response_ids)) for item in batch if item.own_seed is not None]
        draws = OwnDraws(own, ids.device) if own else None
        settings = GenerationConfig(
            do_sample=sampling.temperature > 0 and draws is None,
            max_new_tokens=budget,
            pad_token_id=self.renderer.pad_id,
            eos_token_id=sorted(self._end_ids),
            top_k=None,  # sampling is shaped by our own processor alone
            top_p=None,
            temperature=None,
        )
        processors = LogitsProcessorList([NucleusOfTopK(sampling, draws)] if sampling.temperature > 0 else [])
        if slots:
            latents = torch.cat([item.latents for item in batch if item.latents is not None])
            embeddings = splice(
                model.get_input_embeddings()(ids), torch.tensor(slots, device=ids.device), latents
            )
            output = model.generate(  # pyright: ignore[reportCallIssue]
                inputs_embeds=embeddings,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=processors,
            )
            return output.tolist()  # with embeddings, generate returns the new tokens alone
        output = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=ids, attention_mask=mask, generation_config=settings, logits_processor=processors
        )
        return output[:, longest:].tolist()


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for every module, and each module's own mode back afterwards, come what may."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
