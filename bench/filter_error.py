"""What `grad_filter` costs in accuracy and saves in time, on the logits of a real model at its own tokens.

    python bench/filter_error.py                                      SmolLM2-135M-Instruct, its own vocabulary
    python bench/filter_error.py --vocab 151936 --hidden 512          the same hidden states under a larger head
    python bench/filter_error.py --filters 3e-6 1e-5 --json f.json

The student answers a handful of prompts, sampled as in training (T 0.7, top-p 0.95, top-k 20); the teacher is the same
model under a prompt that says more. Hidden states at those tokens go through the fused linear loss with the filter off
and on. Per threshold: relative error of both hidden gradients (2-norm), share of the vocabulary's columns that were
multiplied, and time over that of the four dense products (into memory that is there before), in turns in this run.

A head larger than the model's repeats its rows with a noise of a tenth of their spread: every id gets near-twins, and
probability spreads over more columns than in a real vocabulary of that size. A smaller hidden size keeps the leading
principal directions of the hidden states.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kl_throughput import positive
from measure import Step, quantiles, relative_error
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl
from lopd_fast.fused_filter import GradFilter

PROMPTS = [
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright.",
    "List five facts about the planet Mars.",
    "Write a Python function that reverses a linked list, with comments.",
    "What should I cook with rice, eggs and spinach?",
    "Summarise the causes of the French Revolution.",
    "How do I prepare for a job interview as a nurse?",
    "Write an SQL query that counts orders per customer in 2023.",
]
PRIVILEGE = (
    " Be brief and concrete, and mention one number."  # what the teacher reads and the student does not
)


@dataclass(frozen=True)
class Problem:
    student: Tensor  # (N, H) hidden states
    teacher: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    labels: Tensor  # (N,) the tokens that the student sampled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model folder; default: the demo's SmolLM2")
    parser.add_argument("--rows", type=positive, default=512, help="tokens, at most")
    parser.add_argument("--vocab", type=positive, help="repeat the head's rows to this many")
    parser.add_argument(
        "--hidden", type=positive, help="keep this many principal directions of the hidden states"
    )
    parser.add_argument("--filters", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 3e-5])
    parser.add_argument(
        "--chunk-size", type=positive, help="rows per chunk; default: as many as the loss takes"
    )
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    problem = sample(options.model, options.rows)
    if options.hidden is not None:
        problem = narrowed(problem, options.hidden)
    if options.vocab is not None:
        problem = widened(problem, options.vocab)
    rows = compare(problem, options.filters, options.chunk_size, options.repeat)
    (count, hidden), vocab = problem.student.shape, len(problem.weight)
    print(
        f"\nN={count} V={vocab:,} H={hidden} fp32, threads: {options.threads}, median of {options.repeat}\n"
    )
    print(table(rows))
    if options.json is not None:
        document = dict(rows=count, vocab=vocab, hidden=hidden, threads=options.threads, results=rows)
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


def sample(folder: Path | None, rows: int) -> Problem:
    """On-policy tokens of a model, and its hidden states at them under the student's and the teacher's prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if folder is None:
        from lopd_fast.demo.smollm import smollm_folder

        folder = smollm_folder()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = -(-rows // len(PROMPTS))

    def encoded(suffix: str) -> Any:
        chats = [[dict(role="user", content=prompt + suffix)] for prompt in PROMPTS]
        return tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )

    def hidden(prompt: Any) -> Tensor:
        """States that predict the completion's tokens  # (prompts * length, H)"""
        ids = torch.cat([prompt["input_ids"], completion], 1)
        mask = torch.cat([prompt["attention_mask"], torch.ones_like(completion)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        states = model.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
        return states[:, -length - 1 : -1].flatten(0, 1)[:rows]

    torch.manual_seed(0)
    with torch.no_grad():
        student = encoded("")
        completion = model.generate(
            **student,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
            top_k=20,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=tokenizer.pad_token_id,
        )[:, student["input_ids"].shape[1] :]
        return Problem(
            hidden(student),
            hidden(encoded(PRIVILEGE)),
            model.get_output_embeddings().weight.detach(),
            completion.flatten()[:rows],
        )


def narrowed(problem: Problem, hidden: int) -> Problem:
    states = torch.cat([problem.student, problem.teacher])
    directions = torch.linalg.svd(states, full_matrices=False)[2][:hidden].T  # (H, hidden)
    student, teacher, weight = (x @ directions for x in (problem.student, problem.teacher, problem.weight))
    return Problem(student, teacher, weight, problem.labels)


def widened(problem: Problem, vocab: int) -> Problem:
    weight, generator = problem.weight, torch.Generator().manual_seed(1)
    parts, noise = [weight], 0.1 * weight.std()
    while sum(map(len, parts)) < vocab:
        parts.append(weight + noise * torch.randn(weight.shape, generator=generator))
    return Problem(problem.student, problem.teacher, torch.cat(parts)[:vocab], problem.labels)


def compare(
    problem: Problem, filters: list[float], chunk_size: int | None, repeat: int
) -> list[dict[str, Any]]:
    """One row with the filter off, then one per threshold."""
    active: list[Tensor] = []
    find = GradFilter.active

    def counted(*arguments: Any) -> Tensor:
        active.append(find(*arguments))
        return active[-1]

    def step(cut: float | None) -> Step:
        def run() -> dict[str, Tensor]:
            leaves = [x.detach().requires_grad_() for x in (problem.student, problem.teacher)]
            out = fused_linear_topk_tail_kl(
                leaves[0],
                problem.weight,
                leaves[1],
                labels=problem.labels,
                grad_filter=cut,
                chunk_size=chunk_size,
            )
            return dict(zip(("student", "teacher"), torch.autograd.grad(out.loss, leaves), strict=True))

        return run

    exact = step(None)()
    results = [dict(grad_filter=None, student_error=0.0, teacher_error=0.0, active=1.0)]
    steps: dict[str, Step] = dict(floor=dense_products(problem), off=step(None))
    GradFilter.active = staticmethod(counted)  # type: ignore[method-assign]
    try:
        for cut in filters:
            active.clear()
            grads = step(cut)()
            errors = {f"{side}_error": relative_error(grads[side], exact[side]) for side in exact}
            results.append(dict(grad_filter=cut, active=float(torch.cat(active).float().mean()), **errors))
            steps[f"{cut:g}"] = step(cut)
    finally:
        GradFilter.active = staticmethod(find)  # type: ignore[method-assign]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, run in steps.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    floor, *others = (quantiles(taken)[1] for taken in times.values())
    for row, seconds in zip(results, others, strict=True):
        row |= dict(seconds=seconds, ratio_to_floor=seconds / floor)
    return results


def dense_products(problem: Problem) -> Step:
    """Both projections and both hidden gradients, without anything between them."""
    logits = problem.weight.new_empty(len(problem.student), len(problem.weight))

    def run() -> dict[str, Tensor]:
        for hidden in (problem.student, problem.teacher):
            torch.mm(hidden, problem.weight.T, out=logits)
            torch.mm(logits, problem.weight)
        return {}

    return run


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| grad_filter | error of student dH | error of teacher dH | active columns | time / floor |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        name = "off" if row["grad_filter"] is None else f"{row['grad_filter']:g}"
        lines.append(
            f"| {name} | {row['student_error']:.1e} | {row['teacher_error']:.1e} | {row['active']:.1%} | "
            f"{row['ratio_to_floor']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
