"""One LOPD step, and the loop around it.

    rollout -> retrieve -> compose -> teacher and student forward -> one fused loss -> one backward to theta and phi
    -> clip -> AdamW -> dual update of beta

Both gradients are taken at the same (theta, phi), so one teacher pass serves both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lopd_fast.batch import Rollout, StepBatch, StepMetrics
from lopd_fast.build import Parts
from lopd_fast.checkpoint import optimizer_tensors, restore_optimizer
from lopd_fast.clock import StepClock
from lopd_fast.envs.base import Task
from lopd_fast.errors import UserError
from lopd_fast.explore import experience_of, successful
from lopd_fast.losses import TopKTailKL, fused_linear_topk_tail_kl
from lopd_fast.memory_advice import advice, learning_advice, memory_told, sampling_advice
from lopd_fast.monitors import Monitors, rewards_by_group
from lopd_fast.objective import anchor_sum, dual_update
from lopd_fast.optimizers import adamw, composer_optimizer, optimizer_step, schedule_factor
from lopd_fast.pack import fitting, micro_batches, pack_step
from lopd_fast.retrieval import retrieve
from lopd_fast.rollout.sampling import Sampling
from lopd_fast.sharding import optimizer_parts, whole
from lopd_fast.step_totals import StepTotals
from lopd_fast.task_order import tasks_of_step
from lopd_fast.teacher import teacher_hidden

LOW_TEACHER_MASS = 0.5


class Trainer:
    """Holds theta's and phi's optimisers, the dual variable and the step counter.

    `say` hears one line whenever a person should know something (a skipped step, a low teacher mass).
    """

    def __init__(self, parts: Parts, tasks: Sequence[Task], say: Callable[[str], None] = print) -> None:
        self.parts = parts
        self.config = parts.config
        self.tasks = list(tasks)
        self._say = say
        self._said: list[str] = []
        self.step = 0
        self.beta = self.config.objective.beta_init
        self.skipped = 0
        self._micro_batch: Sequence[Rollout] = ()  # at work, for a message
        self.clock = StepClock(parts.backbone.device)
        self.monitors = Monitors(parts, self.say)
        self.theta = [parameter for _, parameter in parts.student.trainable()]
        self.phi = [parameter for _, parameter in parts.composer.trainable()["encoder"]]
        self.phi += [parameter for _, parameter in parts.composer.trainable()["qformer"]]
        optim = self.config.optim
        self.theta_optimizer = adamw(optim, [(self.theta, optim.lr)])
        self.phi_optimizer = composer_optimizer(parts.composer, optim)

    def run_step(self) -> StepMetrics:
        """One step; raises nothing for a non-finite loss or gradient: the step is skipped, counted and said.

        Raises:
            UserError: memory ran out; before the optimisers that leaves everything as it was ahead of the step.
        """
        with memory_told(self.out_of_memory):
            return self._run_step()

    def _run_step(self) -> StepMetrics:
        self.clock = StepClock(self.parts.backbone.device)
        with self.clock.phase("rollout"):
            rollouts = self.sample()
        with self.clock.phase("monitors"):
            readings = self.monitors.read(rollouts, self.step)
        metrics = self.update(rollouts)
        metrics.teacher_gap, metrics.teacher_reward = readings.teacher_gap, readings.teacher_reward
        metrics.reward_gap = readings.reward_gap
        if self.config.retrieval.grow:
            self.parts.bank.add([experience_of(rollout) for rollout in successful(rollouts)])
        metrics.bank_size = len(self.parts.bank)
        metrics.phases, metrics.peak_mib = self.clock.seconds(), self.clock.peak_mib()
        metrics.seconds = self.clock.total()
        metrics.tokens_per_second = metrics.tokens / metrics.seconds
        metrics.messages, self._said = self._said, []
        return metrics

    def say(self, text: str) -> None:
        """Tell a person, and keep it for the step's metrics."""
        self._said.append(text)
        self._say(text)

    def sample(self) -> list[Rollout]:
        """This step's rollouts by the student from the tasks alone, with the experiences retrieved for each."""
        train = self.config.train
        chosen = tasks_of_step(self.tasks, self.step, train.tasks_per_step, train.seed)
        tasks = [task for task in chosen for _ in range(train.rollouts_per_task)]
        with self.parts.engine.policy(self.parts.student) as model:
            rollouts = self.parts.engine.rollouts(
                model,
                self.parts.environment,
                tasks,
                Sampling.of(self.config.rollout),
                seed=train.seed * 1_000_003 + self.step,
            )
        found = retrieve(
            self.parts.bank, tasks, self.config.retrieval, seed=train.seed * 1_000_003 + self.step
        )
        for rollout, experiences in zip(rollouts, found, strict=True):
            rollout.experiences = experiences
        return rollouts

    def update(self, rollouts: Sequence[Rollout]) -> StepMetrics:
        """One backward through loss, teacher and student, and one step of both optimisers."""
        kept = self._fitting(rollouts)
        tokens = sum(sum(rollout.student_mask) for rollout in kept)
        divergence = self.divergence
        metrics = self._metrics(rollouts, tokens, divergence)
        metrics.dropped = len(rollouts) - len(kept)
        if tokens == 0:
            return self._skip(metrics, "no rollout of this step holds a token to learn from")
        totals = self.backward(kept)
        with self.clock.phase("optimizers"):
            totals.read_into(metrics, tokens)
            self._step_optimizers(metrics)
        return metrics

    def backward(self, rollouts: Sequence[Rollout]) -> StepTotals:
        """Accumulate the gradients of the whole objective over micro-batches; denominators are the step's own.

        Each process takes its share of the step's rollouts; gradients and totals are then the sums over all.
        """
        config = self.config
        num_items = sum(sum(rollout.student_mask) for rollout in rollouts)
        num_queries = config.composer.num_queries if config.objective.use_latents else 0
        num_latents = sum(len(rollout.experiences) for rollout in rollouts) * num_queries
        totals = StepTotals.zeros(self.parts.backbone.device)
        for group in self._micro_batches(rollouts):
            self._micro_batch = group
            with self.clock.phase("compose"):
                latents, anchors = self._latents(group)
            counts = [latent.shape[0] for latent in latents]
            backbone = self.parts.backbone
            batch = pack_step(group, counts, self.parts.renderer, backbone.shares_prefixes).to(
                backbone.device
            )
            result = self._distill(batch, latents, num_items)
            loss = result.loss
            if num_latents and anchors:
                distance = anchor_sum(latents, anchors) / (num_latents * backbone.hidden_size)
                loss = loss + config.objective.anchor * distance
                totals.anchor += distance.detach()
            with self.clock.phase("backward"):
                self.parts.lockstep.join(loss).backward()
            totals.add(result, batch, loss)
        with self.clock.phase("backward"):
            totals = totals.over(self.parts.world)
            self.parts.world.sum_gradients([*self.theta, *self.phi])  # sharded ones are summed already
        totals.loss += self.beta * config.objective.margin  # the constant of beta (m - Delta)
        return totals

    def out_of_memory(self) -> UserError:
        """What a step says that had too little memory; it leaves no gradient behind."""
        config, backbone, phase = self.config, self.parts.backbone, self.clock.latest
        self._zero_gradients()
        where = f"{phase} of step {self.step + 1}"
        if phase == "optimizers":
            return advice(where, [], "set student.mode=lora or optim.kind=adamw8bit")
        if phase == "monitors":
            return advice(
                where, ["lower train.micro_batch_tokens or rollout.batch_size", "set monitor.gap_every=0"]
            )
        if phase == "rollout":
            return sampling_advice(where, backbone, config.rollout.batch_size)
        return learning_advice(where, self._micro_batch, backbone, config.train.micro_batch_tokens)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Optimiser states, for a checkpoint."""
        return {
            "theta_optimizer": optimizer_tensors(self.theta_optimizer),
            "phi_optimizer": optimizer_tensors(self.phi_optimizer),
        }

    def state(self) -> dict[str, float | int]:
        """The numbers of a checkpoint; every random draw follows from the seed and the step."""
        low_gap = self.monitors.low_gap
        return {"step": self.step, "beta": self.beta, "skipped": self.skipped, "low_gap": low_gap}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Read back what `tensors` and `state` gave."""
        restore_optimizer(self.theta_optimizer, optimizer_parts(tensors["theta_optimizer"], self.theta))
        restore_optimizer(self.phi_optimizer, tensors["phi_optimizer"])
        self.step, self.beta, self.skipped = state["step"], state["beta"], state["skipped"]
        self.monitors.low_gap = state["low_gap"]

    @property
    def divergence(self) -> str:
        """The divergence of the present step: another one may be scheduled for the first share of the steps."""
        early = self.step < self.config.loss.first_share * self.config.train.steps
        return self.config.loss.first_divergence if early else self.config.loss.divergence

    @property
    def warming_up(self) -> bool:
        """Whether this step trains phi alone."""
        return self.step < self.config.objective.teacher_warmup * self.config.train.steps

    def _distill(self, batch: StepBatch, latents: Sequence[Tensor], num_items: int) -> TopKTailKL:
        """Teacher and student forward, and the fused loss of both."""
        loss, student, backbone = self.config.loss, self.parts.student, self.parts.backbone
        with self.clock.phase("teacher"):
            teacher = teacher_hidden(backbone, batch.teacher, latents)
        with self.clock.phase("student"):
            hidden = student.hidden(batch.student)
        head, teacher_head = student.head, backbone.head
        tied = head.weight is teacher_head.weight
        with self.clock.phase("loss"):
            return fused_linear_topk_tail_kl(
                hidden,
                head.weight,
                teacher,
                None if tied else teacher_head.weight,
                student_bias=head.bias,
                teacher_bias=None if tied else teacher_head.bias,
                labels=batch.targets,
                privilege_weight=self.beta * batch.advantages,
                k=min(loss.k, head.weight.shape[0]),
                support=loss.support,
                divergence=self.divergence,
                beta=loss.beta,
                tail=loss.tail,
                temperature=loss.temperature,
                num_items=num_items,
                logit_scale=head.logit_scale,
                logit_softcap=head.logit_softcap,
            )

    def _latents(self, rollouts: Sequence[Rollout]) -> tuple[list[Tensor], list[Tensor]]:
        """c_phi and c_phi0 of every rollout."""
        composer = self.parts.composer
        if not self.config.objective.use_latents:
            return composer([(rollout.task.text, []) for rollout in rollouts]), []
        requests = [(rollout.task.text, rollout.experiences) for rollout in rollouts]
        if self.config.objective.freeze_composer:
            with torch.no_grad():
                return composer(requests), []
        return composer(requests), composer.anchor(requests) if self.config.objective.anchor else []

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
        """This process's share of `rollouts`, in micro-batches; where models are sharded, as many as anybody's."""
        world, renderer = self.parts.world, self.parts.renderer
        if world.size > 1:
            lengths = [len(renderer.prompt(each.messages)[0]) + len(each.response_ids) for each in rollouts]
            rollouts = [rollouts[index] for index in world.share(lengths)]
        groups = micro_batches(rollouts, self.config.train.micro_batch_tokens, renderer)
        return groups + [[]] * (self.parts.lockstep.turns(len(groups)) - len(groups))

    def _fitting(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        queries = self.config.composer.num_queries if self.config.objective.use_latents else 0
        counts = [len(rollout.experiences) * queries for rollout in rollouts]
        kept = fitting(rollouts, counts, self.parts.renderer, self.config.rollout.max_tokens)
        return [rollouts[index] for index in kept]

    def _step_optimizers(self, metrics: StepMetrics) -> None:
        """Clip, check, step, update beta; or skip the step."""
        clip = self.config.optim.clip
        metrics.student_grad_norm = float(whole(nn.utils.clip_grad_norm_(self.theta, clip)))
        metrics.composer_grad_norm = float(nn.utils.clip_grad_norm_(self.phi, clip))
        norms = metrics.student_grad_norm + metrics.composer_grad_norm
        if not math.isfinite(metrics.loss) or not math.isfinite(norms):
            self._skip(metrics, f"loss {metrics.loss:.4g}, gradient norm {norms:.4g}")
            return
        if self.step == 0 and metrics.student_grad_norm == 0.0:
            self.say(
                "warning: the first step's student gradient is exactly 0; does the teacher see anything more?"
            )
        if metrics.teacher_mass < LOW_TEACHER_MASS:
            self.say(
                f"warning: the top-{self.config.loss.k} hold only {metrics.teacher_mass:.2f} of the teacher's mass."
            )
        factor = schedule_factor(self.config.optim, self.step, self.config.train.steps)
        if not self.warming_up:
            optimizer_step(self.theta_optimizer, factor)
        if not self.config.objective.freeze_composer:
            optimizer_step(self.phi_optimizer, factor)
        objective = self.config.objective
        self.beta = dual_update(self.beta, metrics.delta, objective.margin, objective.dual_lr)
        self._finish()

    def _skip(self, metrics: StepMetrics, reason: str) -> StepMetrics:
        self.skipped += 1
        metrics.skipped = True
        self.say(
            f"step {self.step + 1} skipped ({reason}); {self.skipped} skipped so far, nothing was changed."
        )
        self._finish()
        return metrics

    def _finish(self) -> None:
        self._zero_gradients()
        self.step += 1

    def _zero_gradients(self) -> None:
        self.theta_optimizer.zero_grad(set_to_none=True)
        self.phi_optimizer.zero_grad(set_to_none=True)

    def _metrics(self, rollouts: Sequence[Rollout], tokens: int, divergence: str) -> StepMetrics:
        count = max(1, len(rollouts))
        return StepMetrics(
            step=self.step + 1,
            beta=self.beta,
            reward=sum(rollout.reward for rollout in rollouts) / count,
            tokens=tokens,
            response_tokens=sum(len(rollout.response_ids) for rollout in rollouts) / count,
            divergence=divergence,
            group_rewards=rewards_by_group(rollouts),
        )
