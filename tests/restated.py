"""The LOPD step restated in plain autograd and fp64, straight off the paper: one rollout at a time, no padding, no
adapters (each LoRA is added into its weights), full log-softmaxes, and either one backward or the reference's two."""

from dataclasses import dataclass, field

import tiny
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from lopd_fast.batch import Rollout
from lopd_fast.build import Parts
from lopd_fast.qformer import qformer_ref

MEMORY = "Task to solve:\n{task}\n\nReference past trajectory:\n{trace}"
MARK = "@@latents@@"


@dataclass
class Restated:
    """What the objective and its parts come to, and the gradient of every tensor of theta and phi by name."""

    loss: float
    kl: float
    delta: float
    anchor: float
    student_mass: float
    teacher_mass: float
    surprise: float
    gradients: dict[str, Tensor]


@dataclass
class _Sums:
    kl: list[Tensor] = field(default_factory=list)
    gain: list[Tensor] = field(default_factory=list)  # A_n delta_n
    moved: list[Tensor] = field(default_factory=list)  # squares of c_phi - c_phi0
    student_mass: list[Tensor] = field(default_factory=list)
    teacher_mass: list[Tensor] = field(default_factory=list)
    surprise: list[Tensor] = field(default_factory=list)


class Restatement:
    """Holds fp64 copies of everything that `parts` has learned, as leaves."""

    def __init__(self, parts: Parts, plain: PreTrainedModel) -> None:
        self.config, self.tokenizer = parts.config, parts.renderer.tokenizer
        self.plain = plain.double()
        self.frozen = {name: tensor.detach() for name, tensor in self.plain.named_parameters()}
        self.leaves = {
            name: tensor.detach().double().requires_grad_() for name, tensor in tiny.learning(parts).items()
        }
        self.anchor = {name: tensor.detach().double() for name, tensor in _anchor_of(parts).items()}
        self.heads = parts.composer.qformer.heads

    def step(
        self, rollouts: list[Rollout], beta: float, *, divergence: str = "reverse_kl", backwards: int = 1
    ) -> Restated:
        """The objective at these parameters and its gradients, by one backward or by the reference's two."""
        if backwards == 1:
            sums, loss = self._objective(rollouts, beta, divergence)
            loss.backward()
        else:
            _, loss = self._objective(rollouts, beta, divergence, stop_teacher=True)
            theta = [leaf for name, leaf in self.leaves.items() if name.startswith("student/")]
            loss.backward(inputs=theta)
            sums, loss = self._objective(rollouts, beta, divergence, stop_student=True)
            phi = [leaf for name, leaf in self.leaves.items() if not name.startswith("student/")]
            loss.backward(inputs=phi)
        gradients = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in self.leaves.items()
        }
        for leaf in self.leaves.values():
            leaf.grad = None

        def mean(values: list[Tensor]) -> float:
            return float(torch.cat(values).detach().mean()) if values else 0.0

        return Restated(
            loss=float(loss.detach()),
            kl=mean(sums.kl),
            delta=mean(sums.gain),
            anchor=mean(sums.moved),
            student_mass=mean(sums.student_mass),
            teacher_mass=mean(sums.teacher_mass),
            surprise=mean(sums.surprise),
            gradients=gradients,
        )

    def _objective(
        self,
        rollouts: list[Rollout],
        beta: float,
        divergence: str,
        *,
        stop_teacher: bool = False,
        stop_student: bool = False,
    ) -> tuple[_Sums, Tensor]:
        sums = _Sums()
        for rollout in rollouts:
            latents = self._latents(rollout, self.leaves)
            z = self._student_logits(rollout)
            u = self._teacher_logits(rollout, latents)
            self._tokens(
                sums,
                rollout,
                z.detach() if stop_student else z,
                u.detach() if stop_teacher else u,
                divergence,
            )
            if latents.numel():
                sums.moved.append((latents - self._latents(rollout, self.anchor).detach()).square().flatten())
        objective = self.config.objective
        delta = torch.cat(sums.gain).mean()
        loss = torch.cat(sums.kl).mean() + beta * (objective.margin - delta)
        if sums.moved:
            loss = loss + objective.anchor * torch.cat(sums.moved).mean()
        return sums, loss

    def _tokens(self, sums: _Sums, rollout: Rollout, z: Tensor, u: Tensor, divergence: str) -> None:
        """Adds one rollout's tokens; z, u (len(response), V) predict each token of the response."""
        mine = torch.tensor(rollout.student_mask)
        sampled = torch.tensor(rollout.response_ids)[mine]
        s, t = z[mine].log_softmax(-1), u[mine].log_softmax(-1)
        support = t.topk(self.config.loss.k, dim=-1).indices
        inside = torch.zeros_like(t, dtype=torch.bool).scatter(1, support, True)

        def buckets(logprob: Tensor) -> Tensor:
            tail = logprob.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)
            return torch.cat([logprob.gather(1, support), tail], dim=1)

        q, p = buckets(s), buckets(t)
        kl = q.exp() * (q - p) if divergence == "reverse_kl" else p.exp() * (p - q)
        of_student = s.gather(1, sampled[:, None])[:, 0]
        delta = t.gather(1, sampled[:, None])[:, 0] - of_student.detach()
        sums.kl.append(kl.sum(1))
        sums.gain.append((2 * rollout.reward - 1) * delta)
        sums.student_mass.append(q[:, :-1].exp().sum(1))
        sums.teacher_mass.append(p[:, :-1].exp().sum(1))
        sums.surprise.append(-of_student)

    def _student_logits(self, rollout: Rollout) -> Tensor:
        if self.config.student.mode == "full":
            weights = {
                name.removeprefix("student/"): leaf
                for name, leaf in self.leaves.items()
                if "student/" in name
            }
        else:
            weights = self._with_lora("student", self.leaves, self.config.student.lora)
        prompt = self._ids(self._text(rollout.messages))
        ids = torch.tensor([prompt + rollout.response_ids])
        logits = functional_call(self.plain, weights, (), {"input_ids": ids}).logits[0]
        return logits[len(prompt) - 1 : -1]

    def _teacher_logits(self, rollout: Rollout, latents: Tensor) -> Tensor:
        text = self._text(rollout.messages)
        if latents.numel():
            marked = [dict(message) for message in rollout.messages]
            user = next(message for message in marked if message["role"] == "user")
            user["content"] = f"Experience: {MARK}\n\n" + user["content"]
            text = self._text(marked)
        before, _, after = text.partition(MARK)
        head, tail = self._ids(before), self._ids(after) + rollout.response_ids
        embed = self.plain.get_input_embeddings()
        spliced = torch.cat(
            [embed(torch.tensor(head)), latents, embed(torch.tensor(tail, dtype=torch.int64))]
        )
        logits = self.plain(inputs_embeds=spliced[None]).logits[0]
        first = spliced.shape[0] - len(rollout.response_ids)
        return logits[first - 1 : -1]

    def _latents(self, rollout: Rollout, state: dict[str, Tensor]) -> Tensor:
        """c (J*K, H) of one rollout."""
        weights = self._with_lora("encoder", state, self.config.composer.lora)
        body = {
            name.removeprefix("model."): weight
            for name, weight in weights.items()
            if name.startswith("model.")
        }
        compressor = {
            name.removeprefix("qformer/"): tensor
            for name, tensor in state.items()
            if name.startswith("qformer/")
        }
        latents = [torch.zeros(0, self.plain.config.hidden_size, dtype=torch.float64)]
        for item in rollout.experiences:
            ids = torch.tensor([self._ids(MEMORY.format(task=rollout.task.text, trace=item.trace))])
            memory = functional_call(
                self.plain.get_decoder(), body, (), {"input_ids": ids}
            ).last_hidden_state[0]
            ends = torch.tensor([0, memory.shape[0]])
            depth = self.config.composer.depth
            latents.append(qformer_ref(compressor, memory, ends, heads=self.heads, depth=depth)[0])
        return torch.cat(latents)

    def _with_lora(self, part: str, state: dict[str, Tensor], lora) -> dict[str, Tensor]:
        """The plain weights with W + alpha/r B A in place of each adapted W."""
        weights = dict(self.frozen)
        for name, a in state.items():
            if name.startswith(f"{part}/") and ".lora_A." in name:
                target = name.removeprefix(f"{part}/").split(".lora_A.")[0] + ".weight"
                weights[target] = (
                    weights[target] + lora.alpha / lora.rank * state[name.replace("lora_A", "lora_B")] @ a
                )
        return weights

    def _text(self, messages: list[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def _anchor_of(parts: Parts) -> dict[str, Tensor]:
    """phi_0 under the names of phi."""
    state = parts.composer.state()
    adapter = {
        f"encoder/{name}".replace(".anchor.", ".encoder."): tensor
        for name, tensor in parts.backbone.adapter_parameters("anchor")
    }
    compressor = {
        name.replace("anchor_qformer/", "qformer/"): tensor
        for name, tensor in state.items()
        if name.startswith("anchor_qformer/")
    }
    return adapter | compressor
