"""Held-out pass rates of the student and of the teacher, and how far two teachers are apart."""

from collections.abc import Sequence

import torch

from lopd_fast.backbone import Backbone
from lopd_fast.bank import Experience
from lopd_fast.batch import Rollout
from lopd_fast.composer import Composer
from lopd_fast.envs.base import Environment, Task
from lopd_fast.losses import fused_linear_topk_tail_kl
from lopd_fast.pack import pack_step
from lopd_fast.render import Renderer
from lopd_fast.rollout.episodes import Episodes, Progress
from lopd_fast.rollout.sampling import Sampling
from lopd_fast.teacher import teacher_hidden


def pass_rate(rollouts: Sequence[Rollout], group: str | None = None) -> float:
    """Mean reward, of one group of tasks or of all."""
    rewards = [rollout.reward for rollout in rollouts if group is None or rollout.task.group == group]
    return sum(rewards) / len(rewards) if rewards else float("nan")


@torch.no_grad()
def teacher_rollouts(
    backbone: Backbone,
    composer: Composer,
    engine: Episodes,
    environment: Environment,
    tasks: Sequence[Task],
    experiences: Sequence[Sequence[Experience]],
    sampling: Sampling,
    *,
    seed: int,
    progress: Progress | None = None,
) -> list[Rollout]:
    """The teacher acts by itself: the frozen backbone with the latents of task b's `experiences[b]` in its prompt."""
    latents = composer([(task.text, items) for task, items in zip(tasks, experiences, strict=True)])
    with backbone.policy() as model:
        return engine.rollouts(
            model, environment, tasks, sampling, seed=seed, latents=latents, progress=progress
        )


@torch.no_grad()
def teacher_gap(
    backbone: Backbone,
    composer: Composer,
    renderer: Renderer,
    rollouts: Sequence[Rollout],
    positive: Sequence[Sequence[Experience]],
    negative: Sequence[Sequence[Experience]],
    *,
    k: int = 256,
) -> float:
    """KL(z+ || z-): mean over student-written tokens of the divergence, in nats, between two teachers' predictions.

    z+ sees `positive[b]`, z- `negative[b]`. Over the k likeliest tokens of z- and a tail bucket: a lower bound.
    """
    hidden = []
    for experiences in (positive, negative):
        latents = composer([(r.task.text, items) for r, items in zip(rollouts, experiences, strict=True)])
        counts = [latent.shape[0] for latent in latents]
        batch = pack_step(rollouts, counts, renderer, backbone.shares_prefixes).to(backbone.device)
        hidden.append(teacher_hidden(backbone, batch.teacher, latents))
    head = backbone.head
    result = fused_linear_topk_tail_kl(
        hidden[0],
        head.weight,
        hidden[1],
        student_bias=head.bias,
        k=min(k, head.weight.shape[0]),
        logit_scale=head.logit_scale,
        logit_softcap=head.logit_softcap,
    )
    return float(result.loss)
