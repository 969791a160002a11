"""The losses as modules: options when they are made, tensors when they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lopd_fast import loss_checks as checks
from lopd_fast.loss_support import VocabShard
from lopd_fast.losses import TopKTailKL, fused_linear_topk_tail_kl, topk_tail_kl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ONE_ID = VocabShard(0, 1, 1, (1,))  # options are checked before any vocabulary is known


class _Loss(nn.Module):
    """Holds the options of a loss function and calls it; it has no parameters."""

    def __init__(self, return_outputs: bool, **options: Any) -> None:
        super().__init__()
        names = ("k", "support", "divergence", "beta", "tail", "temperature")
        checks.options(ONE_ID, **{name: options[name] for name in names})
        if options["k"] < 1:
            raise ValueError(f"k={options['k']} must be at least 1")
        checks.backend(options["backend"])
        self.options, self.return_outputs = options, return_outputs

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)

    def result(self, outputs: TopKTailKL) -> Any:
        return outputs if self.return_outputs else outputs.loss


class TopKTailKLLoss(_Loss):
    """`lopd_fast.topk_tail_kl` as a module; the options mean what they mean there.

    Args:
        return_outputs: a call returns the whole TopKTailKL (loss, per-token kl, masses, ids) and not its loss alone.

    Raises:
        ValueError, TypeError: for options that cannot work, when the module is made.
    """

    def __init__(
        self,
        *,
        k: int = 20,
        support: str = "teacher",
        divergence: str = "reverse_kl",
        beta: float = 0.5,
        tail: str = "bucket",
        temperature: float = 1.0,
        ignore_index: int = -100,
        process_group: ProcessGroup | None = None,
        backend: str = "auto",
        return_outputs: bool = False,
    ) -> None:
        super().__init__(
            return_outputs,
            k=k,
            support=support,
            divergence=divergence,
            beta=beta,
            tail=tail,
            temperature=temperature,
            ignore_index=ignore_index,
            process_group=process_group,
            backend=backend,
        )

    def forward(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        teacher_topk: tuple[Tensor, Tensor] | None = None,
        token_weight: Tensor | None = None,
        privilege_weight: Tensor | None = None,
        num_items: int | float | Tensor | None = None,
    ) -> Any:
        """logits (..., V), labels (...,) -> loss (), fp32; a TopKTailKL with return_outputs."""
        return self.result(
            topk_tail_kl(
                student_logits,
                teacher_logits,
                labels=labels,
                teacher_topk=teacher_topk,
                token_weight=token_weight,
                privilege_weight=privilege_weight,
                num_items=num_items,
                **self.options,
            )
        )


class FusedLinearTopKTailKLLoss(_Loss):
    """`lopd_fast.fused_linear_topk_tail_kl` as a module; the options mean what they mean there.

    Args:
        return_outputs: a call returns the whole TopKTailKL (loss, per-token kl, masses, ids) and not its loss alone.

    Raises:
        ValueError, TypeError: for options that cannot work, when the module is made.
    """

    def __init__(
        self,
        *,
        k: int = 20,
        support: str = "teacher",
        divergence: str = "reverse_kl",
        beta: float = 0.5,
        tail: str = "bucket",
        temperature: float = 1.0,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        chunk_size: int | None = None,
        grad_filter: float | None = None,
        process_group: ProcessGroup | None = None,
        backend: str = "auto",
        return_outputs: bool = False,
    ) -> None:
        checks.projection(logit_scale, logit_softcap, chunk_size, grad_filter)
        super().__init__(
            return_outputs,
            k=k,
            support=support,
            divergence=divergence,
            beta=beta,
            tail=tail,
            temperature=temperature,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
            chunk_size=chunk_size,
            grad_filter=grad_filter,
            process_group=process_group,
            backend=backend,
        )

    def forward(
        self,
        student_hidden: Tensor,
        student_weight: Tensor,
        teacher_hidden: Tensor | None = None,
        teacher_weight: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        teacher_topk: tuple[Tensor, Tensor] | None = None,
        token_weight: Tensor | None = None,
        privilege_weight: Tensor | None = None,
        num_items: int | float | Tensor | None = None,
    ) -> Any:
        """hidden (..., H), weight (V, H), labels (...,) -> loss (), fp32; a TopKTailKL with return_outputs."""
        return self.result(
            fused_linear_topk_tail_kl(
                student_hidden,
                student_weight,
                teacher_hidden,
                teacher_weight,
                student_bias=student_bias,
                teacher_bias=teacher_bias,
                labels=labels,
                teacher_topk=teacher_topk,
                token_weight=token_weight,
                privilege_weight=privilege_weight,
                num_items=num_items,
                **self.options,
            )
        )
