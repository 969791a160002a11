"""The vLLM rollout engine: vLLM in this process, on the GPU that trains, awake only while it samples.

LoRA student: vLLM holds the base model and gets the student's adapter as a new LoRA request at every step. Asleep at
    level 1, its weights lie in the host's memory.
Full student: its weights are loaded into vLLM's model at every step. Asleep at level 2, vLLM keeps none.
The teacher reads latents, not ids alone: it is rolled out by transformers (`hf.py`), on the backbone that is there.

Requests carry ids and bring ids back. Each has a seed of its own, from the call's seed, the episode and the turn.
"""

import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lopd_fast.backbone import Backbone, pick_device
from lopd_fast.batch import Rollout
from lopd_fast.config import Config
from lopd_fast.envs.base import Environment, Task
from lopd_fast.errors import UserError
from lopd_fast.render import Renderer
from lopd_fast.rollout.episodes import Episodes, Progress, Running
from lopd_fast.rollout.hf import HFRollout
from lopd_fast.rollout.sampling import Sampling
from lopd_fast.student import Student

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for; smaller ones are padded


def check_vllm(config: Config) -> None:
    """Refuse what cannot run with `rollout.engine=vllm`, before anything loads.

    Raises:
        UserError: no such package, no GPU, or a LoRA of too high a rank.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.engine=vllm needs the package vllm, which is not installed here; run: pip install "
            "'lopd-fast[vllm]', or set rollout.engine=hf."
        )
    if pick_device(config.model.device).type != "cuda":
        raise UserError("rollout.engine=vllm needs a CUDA device; set rollout.engine=hf on this machine.")
    if config.student.mode == "lora" and config.student.lora.rank > RANKS[-1]:
        raise UserError(
            f"student.lora.rank={config.student.lora.rank}, but vLLM takes {RANKS[-1]} at most; lower it, or set "
            "rollout.engine=hf."
        )


class VLLMRollout(Episodes):
    """Rolls the student out with vLLM. A policy is the LoRA request to sample with, or None for vLLM's weights."""

    def __init__(self, renderer: Renderer, config: Config, backbone: Backbone) -> None:
        """Starts vLLM and puts it to sleep.

        Raises:
            UserError: vLLM refuses the model, or its share of the memory is not free.
        """
        super().__init__(renderer, config.rollout)
        # Read at vLLM's import: weights go in by reference.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        vllm: Any = importlib.import_module("vllm")
        self._vllm, self._lora_request = vllm, importlib.import_module("vllm.lora.request").LoRARequest
        self._hf = HFRollout(renderer, config.rollout)
        self._lora = config.student.mode == "lora"
        self._adapters = tempfile.TemporaryDirectory(prefix="lopd-fast-adapters-")
        self._pushed = 0  # adapters handed over so far
        lora: dict[str, Any] = {}
        if self._lora:
            rank = next(rank for rank in RANKS if rank >= config.student.lora.rank)
            lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        try:
            self._llm = vllm.LLM(
                model=str(Path(config.model.path).expanduser()),
                dtype=str(backbone.model.dtype).removeprefix("torch."),
                trust_remote_code=config.model.trust_remote_code,
                gpu_memory_utilization=config.rollout.vllm_memory,
                max_model_len=config.rollout.max_tokens,
                generation_config="vllm",  # nothing of the model folder's own sampling
                enable_sleep_mode=True,
                **lora,
            )
        except (ValueError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"vLLM does not start with rollout.vllm_memory={config.rollout.vllm_memory}: {reason}"
            ) from error
        self._sleep()

    @contextmanager
    def policy(self, student: Student) -> Iterator[Any]:
        """vLLM awake with the student's present weights."""
        if self._lora:
            with self._awake():
                yield self._new_adapter(student.backbone)
        else:
            with self._awake(student.state().items()):
                yield None

    @contextmanager
    def base(self, backbone: Backbone) -> Iterator[None]:
        """vLLM awake with the backbone's weights."""
        with self._awake(None if self._lora else backbone.merged_state(None)):
            yield None

    def rollouts(
        self,
        model: Any,
        environment: Environment,
        tasks: Sequence[Task],
        sampling: Sampling,
        *,
        seed: int,
        latents: Sequence[Tensor] | None = None,
        progress: Progress | None = None,
    ) -> list[Rollout]:
        """As every engine; with a model of transformers, such as a teacher that has latents, by transformers."""
        play = self._hf.rollouts if isinstance(model, PreTrainedModel) else super().rollouts
        return play(model, environment, tasks, sampling, seed=seed, latents=latents, progress=progress)

    @property
    def _at_once(self) -> int:
        return 1 << 30  # vLLM makes its own batches

    @contextmanager
    def _sampling(self, model: Any, seed: int) -> Iterator[None]:
        with torch.random.fork_rng(range(torch.cuda.device_count())):  # vLLM shares this process's generators
            yield

    def _generate(
        self, model: Any, batch: Sequence[Running], sampling: Sampling, budget: int
    ) -> list[list[int]]:
        long = next((item for item in batch if len(item.ids) >= self.config.max_tokens), None)
        if long is not None:
            raise UserError(
                f"Task {long.rollout.task.id} has a prompt of {len(long.ids)} tokens, which leaves no room within "
                f"rollout.max_tokens={self.config.max_tokens}; raise it."
            )
        outputs = self._llm.generate(
            [self._vllm.TokensPrompt(prompt_token_ids=item.ids) for item in batch],
            [self._params(item, sampling) for item in batch],
            use_tqdm=False,
            lora_request=model,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _params(self, item: Running, sampling: Sampling) -> Any:
        """The behaviour policy for one turn of one episode; what ends it is what ends it in every engine."""
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=((item.seed * 1_000_003 + item.order) * 1_009 + item.turns) % 2**31,
            max_tokens=self._room(item),
            stop_token_ids=sorted(self._end_ids),
            ignore_eos=True,
            detokenize=False,
        )

    def _new_adapter(self, backbone: Backbone) -> Any:
        """A LoRA request for the student's adapter as it is now. vLLM knows adapters by id, so each has a new one."""
        folder = Path(self._adapters.name)
        shutil.rmtree(folder / str(self._pushed), ignore_errors=True)
        self._pushed += 1
        folder = folder / str(self._pushed)
        backbone.save_adapter("student", folder)
        return self._lora_request(f"student-{self._pushed}", self._pushed, str(folder))

    @contextmanager
    def _awake(self, weights: Iterable[tuple[str, Tensor]] | None = None) -> Iterator[None]:
        """vLLM awake, with `weights` by name in its model where some are given."""

        def load(model: Any) -> None:
            model.load_weights(weights)

        torch.cuda.empty_cache()  # what the trainer holds in reserve is in vLLM's way
        self._llm.wake_up(tags=["weights"])
        if weights is not None:
            self._llm.apply_model(load)
        self._llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        self._llm.sleep(level=1 if self._lora else 2)
