"""Lists of log-probs as servers return them, and the loss that comes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ops.oracle import expected, peaked, relative_error
from torch import Tensor

from lopd_fast import fused_linear_topk_tail_kl, served_topk, topk_tail_kl

WIDTH, K = 50, 4
LENGTHS = [K, K - 1, K + 1, 0, K]  # of each row, as servers have it: short, with the sampled id added, silent


@dataclass
class Logprob:
    """vLLM's."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class ChatToken:
    """An entry of an OpenAI client's logprobs.content, and of its top_logprobs."""

    token: str
    logprob: float
    top_logprobs: list[Any] | None = None


def candidates(teacher: Tensor) -> list[list[tuple[int, float]]]:
    """(id, log-prob) of each row's LENGTHS likeliest ids, out of order."""
    logprobs = teacher.log_softmax(-1)
    rows = []
    for row, length in zip(logprobs, LENGTHS, strict=True):
        ids = row.topk(length).indices.flip(0).roll(1).tolist()
        rows.append([(token, row[token].item()) for token in ids])
    return rows


def vllm(row: list[tuple[int, float]]) -> Any:
    return {token: Logprob(value, rank=7, decoded_token="x") for token, value in row} or None


def vllm_http(row: list[tuple[int, float]]) -> Any:
    holders = {token: {"logprob": value, "rank": 7, "decoded_token": "x"} for token, value in row}
    return json.loads(json.dumps(holders or None))


def sglang(row: list[tuple[int, float]]) -> Any:
    return [[value, token, None] for token, value in row] or None


def completions(row: list[tuple[int, float]]) -> Any:
    return {f"token_id:{token}": value for token, value in row}


def chat(row: list[tuple[int, float]]) -> Any:
    return {"token": "x", "top_logprobs": [{"token": f"token_id:{t}", "logprob": v} for t, v in row]}


def chat_client(row: list[tuple[int, float]]) -> Any:
    return ChatToken("x", -1.0, [ChatToken(f"token_id:{token}", value) for token, value in row])


def plain(row: list[tuple[int, float]]) -> Any:
    return dict(row)


FORMS = [vllm, vllm_http, sglang, completions, chat, chat_client, plain]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_loss_of_the_logits(form: Any) -> None:
    """Rows of k, k - 1, k + 1 and no candidates: each as if the teacher's logits were there, over the listed ids."""
    student, teacher = (peaked(len(LENGTHS), WIDTH, seed=seed, scale=1.5) for seed in (1, 2))
    ids, logprobs = served_topk([form(row) for row in candidates(teacher)])
    assert ids.shape == logprobs.shape == (len(LENGTHS), K + 1)
    assert ids.dtype == torch.int64 and logprobs.dtype == torch.float32
    leaf = student.float().requires_grad_()
    out = topk_tail_kl(leaf, teacher_topk=(ids, logprobs))
    out.kl.sum().backward()
    assert leaf.grad is not None
    for row, length in enumerate(LENGTHS):
        wanted = teacher[row].topk(length).indices  # likeliest first
        assert ids[row].tolist() == [*wanted.tolist(), *[-1] * (K + 1 - length)]
        assert logprobs[row, length:].eq(-torch.inf).all()
        if not length:
            assert out.kl[row].item() == 0 and not leaf.grad[row].any()
            continue
        one = student[row : row + 1].clone().requires_grad_()
        want = expected(one, teacher[row : row + 1], ids=wanted[None])
        want.kl.sum().backward()
        assert one.grad is not None
        assert out.kl[row].item() == pytest.approx(want.kl.item(), rel=1e-4, abs=1e-6)
        assert relative_error(leaf.grad[row], one.grad[0]) < 1e-4


def test_fused_loss_of_a_served_teacher_equals_that_of_its_logits() -> None:
    """Lists of exactly k: the very loss and gradients that the teacher's own top-k gives."""
    hidden, weight = torch.randn(len(LENGTHS), 8), torch.randn(WIDTH, 8)
    teacher = peaked(len(LENGTHS), WIDTH, seed=3, scale=1.5).float()
    best = teacher.log_softmax(-1).topk(K)
    rows = [
        dict(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(best.indices, best.values, strict=True)
    ]
    leaf, direct = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    fused_linear_topk_tail_kl(leaf, weight, teacher_topk=served_topk(rows)).loss.backward()
    topk_tail_kl(direct @ weight.T, teacher, k=K).loss.backward()
    assert relative_error(leaf.grad, direct.grad) < 1e-4


def test_k_keeps_the_likeliest_with_ties_to_the_lowest_id() -> None:
    rows = [{9: -1.0, 3: -1.0, 7: -1.0, 1: -2.0}, [[-3.0, 5, "a"], [-0.5, 6, "b"]], None]
    ids, logprobs = served_topk(rows, k=3)
    assert ids.tolist() == [[3, 7, 9], [6, 5, -1], [-1, -1, -1]]
    assert logprobs[1, :2].tolist() == [-0.5, -3.0] and logprobs[2].eq(-torch.inf).all()


def test_what_a_server_does_not_know_is_left_out() -> None:
    """null, NaN, -inf, -9999 and negative ids; a log-prob that rounding put above 0 counts as 0."""
    rows = [
        {1: None, 2: float("nan"), 3: -float("inf"), 4: -9999.0, -1: -1.0, 5: -0.25},
        [None, [None, 3, None]],
        [[3e-7, 2]],
    ]
    ids, logprobs = served_topk(rows)
    assert ids.tolist() == [[5], [-1], [2]]
    assert logprobs.tolist() == [[-0.25], [-float("inf")], [0.0]]


@pytest.mark.parametrize("rows, shape", [([], (0, 0)), ([None, {}, []], (3, 0))])
def test_nothing_at_all(rows: list[Any], shape: tuple[int, int]) -> None:
    ids, logprobs = served_topk(rows)
    assert ids.shape == logprobs.shape == shape
    student = torch.randn(shape[0], WIDTH, requires_grad=True)
    out = topk_tail_kl(student, teacher_topk=(ids, logprobs))
    out.loss.backward()
    assert out.loss.item() == 0 and student.grad is not None and not student.grad.any()


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "a whole response": (TypeError, "one entry of log-probs per token, not dict", {"choices": []}),
    "one row": (TypeError, "row 0.*0.5", [-0.5, -1.0]),
    "text": (ValueError, "row 1.*' the' is text.*return_tokens_as_token_ids", [None, {" the": -1.0}]),
    "text of digits": (ValueError, "row 0.*'12' is text", [{"12": -1.0}]),
    "chat text": (ValueError, "row 0.*'a' is text", [{"top_logprobs": [{"token": "a", "logprob": -1.0}]}]),
    "no id": (TypeError, "row 0.*None is not a token id", [[{"logprob": -1.0}]]),
    "swapped": (TypeError, r"row 0.*-0.5 is not a token id.*\[logprob, id, text\]", [[[17, -0.5]]]),
    "short entry": (ValueError, r"row 0.*\[-0.5\] is not", [[[-0.5]]]),
    "logits": (ValueError, "row 0.*3.5 for id 2 is above 0", [{2: 3.5}]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_sentence(case: str) -> None:
    kind, sentence, rows = REFUSED[case]
    with pytest.raises(kind, match=sentence) as refusal:
        served_topk(rows)
    assert "\n" not in str(refusal.value)


def test_refuses_k_below_1() -> None:
    with pytest.raises(ValueError, match="k=0"):
        served_topk([{1: -1.0}], k=0)
