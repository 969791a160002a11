"""Cold start: phi_0 by next-token NLL of the teacher on successful trajectories (paper, eq. 14).

The backbone is frozen; each trajectory is read with the latents of other experiences in its prompt, so what lowers
the NLL is what the latents carry over.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lopd_fast.backbone import Backbone, Head
from lopd_fast.bank import Experience, ExperienceBank
from lopd_fast.batch import Rollout
from lopd_fast.composer import Composer
from lopd_fast.config import ColdStartConfig, RetrievalConfig
from lopd_fast.errors import UserError
from lopd_fast.memory_advice import advice, learning_advice, memory_told
from lopd_fast.optimizers import composer_optimizer, optimizer_step, schedule_factor
from lopd_fast.pack import micro_batches, pack_step
from lopd_fast.processes import World
from lopd_fast.render import Renderer
from lopd_fast.retrieval import retrieve
from lopd_fast.teacher import teacher_hidden

LOGITS_BYTES = 512 << 20  # of the fp32 logits that are held at once
Example = tuple[Rollout, Sequence[Experience]]


@dataclass
class ColdStartMetrics:
    """What one cold-start step reports."""

    step: int
    nll: float  # nats a token
    grad_norm: float
    seconds: float
    skipped: bool = False


class ColdStart:
    """Trains phi on `trajectories`, each with the experiences that retrieval finds for it (itself left out)."""

    def __init__(
        self,
        backbone: Backbone,
        composer: Composer,
        renderer: Renderer,
        bank: ExperienceBank,
        trajectories: Sequence[Rollout],
        config: ColdStartConfig,
        retrieval: RetrievalConfig,
        seed: int,
        micro_batch_tokens: int,
        say: Callable[[str], None] = print,
        world: World | None = None,
    ) -> None:
        """Raises UserError where the bank holds nothing for any of `trajectories`."""
        self.backbone, self.composer, self.renderer = backbone, composer, renderer
        self.config = config
        self.say = say
        self.world = world or World()
        self.step = 0
        self.seed = seed
        self._micro_batch: Sequence[Rollout] | None = None  # at work, for a message
        self.micro_batch_tokens = micro_batch_tokens
        tasks = [rollout.task for rollout in trajectories]
        found = retrieve(bank, tasks, retrieval, seed=seed)
        self.examples = [(rollout, hits) for rollout, hits in zip(trajectories, found, strict=True) if hits]
        if not self.examples and config.steps:
            raise UserError(
                f"None of the {len(trajectories)} trajectories has an experience of another task to learn from; add "
                "experiences, or let a task see its own (retrieval.allow_self=true)."
            )
        self.optimizer = composer_optimizer(composer, config.optim)
        self.parameters = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]

    def run_step(self) -> ColdStartMetrics:
        """One step on a random batch; a non-finite loss or gradient skips it.

        Raises:
            UserError: memory ran out; before the optimiser that leaves everything as it was ahead of the step.
        """
        with memory_told(self.out_of_memory):
            return self._run_step()

    def _run_step(self) -> ColdStartMetrics:
        started = time.perf_counter()
        groups = [rollout.task.group for rollout, _ in self.examples]
        chosen = draw_evenly(groups, self.config.batch_size, self.seed * 1_000_003 + self.step)
        value = self.backward([self.examples[index] for index in chosen])
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.optim.clip))
        metrics = ColdStartMetrics(self.step + 1, value, norm, 0.0)
        if math.isfinite(value) and math.isfinite(norm):
            optimizer_step(self.optimizer, schedule_factor(self.config.optim, self.step, self.config.steps))
        else:
            metrics.skipped = True
            self.say(f"cold-start step {self.step + 1} skipped: loss {value:.4g}, gradient norm {norm:.4g}.")
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        metrics.seconds = time.perf_counter() - started
        return metrics

    def backward(self, examples: Sequence[Example]) -> float:
        """The gradient of the mean NLL over the student-written tokens of `examples`, by micro-batches; its value.

        Each process takes its share of the examples; gradient and value are the sums over all.
        """
        found = {id(rollout): hits for rollout, hits in examples}
        tokens = [sum(rollout.student_mask) for rollout, _ in examples]
        own, lockstep = self.world.share(tokens), self.backbone.lockstep
        groups = micro_batches([examples[index][0] for index in own], self.micro_batch_tokens, self.renderer)
        groups += [[]] * (lockstep.turns(len(groups)) - len(groups))
        losses = []
        for group in groups:
            self._micro_batch = group
            share = sum(sum(rollout.student_mask) for rollout in group) / sum(tokens)
            loss = share * trajectory_nll(
                self.backbone,
                self.composer,
                self.renderer,
                [(rollout, found[id(rollout)]) for rollout in group],
            )
            lockstep.join(loss).backward()
            losses.append(loss.detach())
        self._micro_batch = None
        self.world.sum_gradients(self.parameters)
        losses = losses or [torch.zeros((), device=self.backbone.device)]
        return float(self.world.sum(torch.stack(losses).sum()))

    def out_of_memory(self) -> UserError:
        """What a step says that had too little memory; it leaves no gradient behind."""
        self.optimizer.zero_grad(set_to_none=True)
        where = f"cold-start step {self.step + 1}"
        if self._micro_batch is None:
            return advice(f"the optimizer of {where}", [], "set cold_start.optim.kind=adamw8bit")
        return learning_advice(where, self._micro_batch, self.backbone, self.micro_batch_tokens)


def trajectory_nll(
    backbone: Backbone, composer: Composer, renderer: Renderer, examples: Sequence[Example]
) -> Tensor:
    """Mean NLL () over the student-written tokens of `examples`, given their experiences' latents."""
    rollouts = [rollout for rollout, _ in examples]
    latents = composer([(rollout.task.text, hits) for rollout, hits in examples])
    counts = [latent.shape[0] for latent in latents]
    batch = pack_step(rollouts, counts, renderer, backbone.shares_prefixes).to(backbone.device)
    return linear_nll(teacher_hidden(backbone, batch.teacher, latents), backbone.head, batch.targets)


def draw_evenly(groups: Sequence[str], count: int, seed: int) -> list[int]:
    """Random positions in `groups`, at most `count`, none twice, the groups taking turns until one has no more.

    A group that had few successes so counts as much as one that had many: else the composer learns the answers of the
    latter, whatever the experience says.
    """
    generator = torch.Generator().manual_seed(seed)
    left: dict[str, list[int]] = {}
    order: list[int] = torch.randperm(len(groups), generator=generator).tolist()
    for index in order:
        left.setdefault(groups[index], []).append(index)
    turns = list(left.values())
    drawn: list[int] = []
    while turns and len(drawn) < count:
        drawn += [turn.pop() for turn in turns][: count - len(drawn)]
        turns = [turn for turn in turns if turn]
    return drawn


def linear_nll(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Mean next-token NLL () fp32 of hidden (N, H) under a head, for targets (N,).

    Rows whose logits would pass LOGITS_BYTES are taken in parts, each projected again in the backward.
    """
    if not len(hidden):  # a process without an example of its own
        return hidden.float().sum()
    rows = max(1, LOGITS_BYTES // (4 * head.weight.shape[0]))
    if len(hidden) <= rows:
        return _nll(hidden, head, targets) / len(hidden)
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    sums = [checkpoint(_nll, part, head, ids, use_reentrant=False) for part, ids in parts]
    return torch.stack(sums).sum() / len(hidden)


def _nll(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, head.weight, head.bias).float() * head.logit_scale
    if head.logit_softcap is not None:
        logits = head.logit_softcap * torch.tanh(logits / head.logit_softcap)
    return F.cross_entropy(logits, targets, reduction="sum")
