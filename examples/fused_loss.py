"""The fused loss by itself: the same loss and gradients as the plain formula, without the logits.

python examples/fused_loss.py
"""

import torch

from lopd_fast import fused_linear_topk_tail_kl, topk_tail_kl

ROWS, HIDDEN, VOCABULARY = 2048, 64, 32_000


def main() -> None:
    """Compare the fused loss from hidden states with the loss of full logits."""
    torch.manual_seed(0)
    head = 6 * torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5  # peaked, as language models are
    student = torch.randn(ROWS, HIDDEN, requires_grad=True)
    teacher = (student.detach() + 0.3 * torch.randn(ROWS, HIDDEN)).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS,))

    fused = fused_linear_topk_tail_kl(student, head, teacher, labels=labels, k=20)
    (gradient,) = torch.autograd.grad(fused.loss, student)

    plain = topk_tail_kl(
        student @ head.T, teacher @ head.T, labels=labels, k=20
    )  # two (rows, vocabulary) tensors
    (expected,) = torch.autograd.grad(plain.loss, student)
    error = (expected - gradient).norm() / expected.norm()
    print(f"loss  fused {fused.loss:.6f}   from logits {plain.loss:.6f}   gradient differs by {error:.1e}")
    print(f"logits that the fused loss never held: {2 * ROWS * VOCABULARY * 4 / 2**20:.0f} MiB")
    print(
        f"teacher's mass on its top-20: {fused.teacher_mass.mean():.2f}, student's: {fused.student_mass.mean():.2f}"
    )


if __name__ == "__main__":
    main()
