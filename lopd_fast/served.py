"""A served teacher's log-probs, as inference servers return them, in the form that the losses take.

Row n of what comes out must be about the token that row n of the student predicts. Servers list position i as the
log-probs *of* token i given those before it, so a prompt of P tokens and a completion of C pair with entries P to
P + C - 1 of vLLM's `prompt_logprobs` or SGLang's `input_top_logprobs`, and with logits P - 1 to P + C - 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lopd_fast.loss_checks import MISSING_LOGPROB

ROUNDING = 1e-3  # a log-prob this far above 0 is a server's rounding, not a logit
ID_PREFIX = "token_id:"  # how OpenAI-like servers write ids where the protocol has text


def served_topk(rows: Sequence[Any], *, k: int | None = None) -> tuple[Tensor, Tensor]:
    """The pair `teacher_topk=` of the losses, from one list of log-probs per token.

    Args:
        rows: one entry per token, in any mix of these forms, each with its candidates in any order and number:
            vLLM, {id: Logprob} or {id: float}, or over HTTP {"id": {"logprob": ...}};
            SGLang, [[logprob, id, text], ...];
            OpenAI-like, {"top_logprobs": [{"token": "token_id:17", "logprob": ...}, ...]} or {"token_id:17": float}
            (vLLM writes ids there when asked with return_tokens_as_token_ids);
            None, or nothing listed, for a token that the server says nothing about.
            Candidates whose log-prob is null, NaN, -inf or <= -9000, or whose id is negative, are left out.
        k: keep the k most likely of each row, ties to the lowest id. None: keep all, the sampled token that vLLM adds
            to its top-k included: any list is a valid support, and a longer one is the finer.

    Returns:
        ids (N, k') int64 by falling log-prob, padded with -1, and logprobs (N, k') fp32, padded with -inf; k' is k, or
        the length of the longest row.

    Raises:
        ValueError, TypeError: for what is no list of log-probs, naming the row.
    """
    if k is not None and k < 1:
        raise ValueError(f"k={k} must be at least 1, or None for all that is listed")
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Sequence):
        raise TypeError(
            f"rows must be a list with one entry of log-probs per token, not {type(rows).__name__}: pass the server's "
            "prompt_logprobs, input_top_logprobs or logprobs.content"
        )
    listed = []
    for number, row in enumerate(rows):
        try:
            listed.append(sorted(_candidates(row))[:k])
        except (TypeError, ValueError, IndexError) as error:
            raise type(error)(f"row {number} of the served log-probs: {error}") from None
    width = max(map(len, listed), default=0) if k is None else k
    padded = [row + [(math.inf, -1)] * (width - len(row)) for row in listed]
    ids = torch.tensor([[token for _, token in row] for row in padded], dtype=torch.int64)
    cost = torch.tensor([[cost for cost, _ in row] for row in padded], dtype=torch.float32)
    return ids.view(len(rows), width), -cost.view(len(rows), width)


def _candidates(row: Any) -> Iterator[tuple[float, int]]:
    """(-log-prob, id) of every usable candidate: sorted, the likeliest come first and ties go to the lowest id."""
    for token, value in _pairs(row):
        if isinstance(value, Mapping):
            value = value.get("logprob")
        value = getattr(value, "logprob", value)
        if value is None:
            continue
        value = float(value)
        if token < 0 or math.isnan(value) or value <= MISSING_LOGPROB:
            continue
        if value > ROUNDING:
            raise ValueError(f"{value} for id {token} is above 0: log-probabilities are needed, not logits")
        yield max(-value, 0.0), token


def _pairs(row: Any) -> Iterator[tuple[int, Any]]:
    """(id, log-prob or its holder), whatever form the row has."""
    top = row.get("top_logprobs", row) if isinstance(row, Mapping) else getattr(row, "top_logprobs", row)
    if top is None:
        return
    if isinstance(top, Mapping):
        for token, value in top.items():
            # A bare number as text is an id in vLLM's JSON, whose values are objects, and text elsewhere.
            yield _token_id(token, digits=not isinstance(value, (int, float, type(None)))), value
    elif isinstance(top, Sequence) and not isinstance(top, str):
        for entry in top:
            if entry is None:
                continue
            if isinstance(entry, Mapping):
                yield _token_id(entry["token"] if "token" in entry else None), entry
            elif isinstance(entry, Sequence) and not isinstance(entry, str):
                if len(entry) < 2:
                    raise ValueError(f"{entry!r} is not [logprob, id, text]")
                yield _token_id(entry[1]), entry[0]
            else:
                yield _token_id(getattr(entry, "token", entry)), entry
    else:
        raise TypeError(f"{row!r} is not a list or dict of candidates")


def _token_id(token: Any, digits: bool = False) -> int:
    if isinstance(token, str):
        number = token.removeprefix(ID_PREFIX)
        if number.isdecimal() and (digits or number != token):
            return int(number)
        raise ValueError(
            f"{token!r} is text, not a token id: ask the server for ids (vLLM: return_tokens_as_token_ids), or make "
            "the keys integers"
        )
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"{token!r} is not a token id; candidates are {{id: logprob}} or [logprob, id, text]")
    return token.__index__()
