"""The fused loss by itself: the same loss and gradients as from full logits, in less memory.

python examples/fused_loss.py
"""

import torch
from peak_memory import peak_of
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl

ROWS, HIDDEN, VOCABULARY = 2048, 64, 32_000


def loss_and_gradient(fused: bool) -> tuple[float, Tensor, str]:
    """From hidden states, or from logits that are two (rows, vocabulary) tensors."""
    torch.manual_seed(0)
    head = 6 * torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5  # peaked, as language models are
    student = torch.randn(ROWS, HIDDEN, requires_grad=True)
    teacher = student.detach() + 0.3 * torch.randn(ROWS, HIDDEN)
    labels = torch.randint(VOCABULARY, (ROWS,))
    if fused:
        out = fused_linear_topk_tail_kl(student, head, teacher, labels=labels, k=20)
    else:
        out = topk_tail_kl(student @ head.T, teacher @ head.T, labels=labels, k=20)
    (gradient,) = torch.autograd.grad(out.loss, student)
    masses = f"teacher's mass on its top-20: {out.teacher_mass.mean():.2f}, student's: {out.student_mass.mean():.2f}"
    return out.loss.item(), gradient, masses


def main() -> None:
    """Compare the fused loss from hidden states with the loss of full logits."""
    gradients, masses = [], ""
    for name, fused in (("from logits", False), ("fused", True)):
        (loss, gradient, masses), peak = peak_of(loss_and_gradient, fused)
        gradients.append(gradient)
        print(f"{name:12} loss {loss:.6f}   peak memory {peak:,.0f} MiB")
    expected, got = gradients
    print(f"the gradients differ by {(expected - got).norm() / expected.norm():.1e}; {masses}")


if __name__ == "__main__":
    main()
