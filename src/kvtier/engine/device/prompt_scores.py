"""Log-probabilities of prompt tokens, from the hidden states of a step's chunks.

A chunk's logits take more memory than its KV, so they are computed a few rows at a time. The runner's thread makes a
`PromptScores` with the step; nothing waits for it until the step's results are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.engine.prompt_token import PromptToken
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step
from kvtier.kernels.upload import Download, upload

MAX_SLICE_ROWS = 256
"""Rows whose logits exist at a time; no more than a step may sample for, which the device has room for."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of a request's prompt, from position `start` on."""

    request: Request
    start: int
    tokens: list[PromptToken]


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens that follow those a step computed: the token at position `start` follows the hidden state `place`."""

    request: Request
    start: int
    token_ids: list[int]
    place: int


class PromptScores:
    """The scores of one step, on their way to the host."""

    def __init__(
        self,
        step: Step,
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
        *,
        max_rows: int,
        vocab_size: int,
    ) -> None:
        """`logits` computes the logits of hidden states; it is called for `max_rows` of them at a time."""
        self._spans = _spans(step)
        self._scores: Download | None = None
        if not self._spans:  # a prompt of one token
            return
        token_ids = np.concatenate([np.array(span.token_ids, np.int64) for span in self._spans])
        places = np.concatenate([span.place + np.arange(len(span.token_ids), dtype=np.int64) for span in self._spans])
        num_top = min(max(span.request.params.prompt_logprobs or 0 for span in self._spans), vocab_size)
        rows, targets = upload([places, token_ids], hidden.device)
        slices = [
            _scored(logits(hidden[rows[first : first + max_rows]]), targets[first : first + max_rows], num_top)
            for first in range(0, len(token_ids), max_rows)
        ]
        self._scores = Download([torch.cat(parts) for parts in zip(*slices, strict=True)])

    @property
    def is_done(self) -> bool:
        return self._scores is None or self._scores.is_done

    def close(self) -> None:
        """Drop the scores: they are no longer wanted."""
        if self._scores is not None:
            self._scores.close()

    def wait(self) -> list[ScoredTokens]:
        """The scored tokens, once they are on the host. Call it once."""
        if self._scores is None:
            return []
        own, ranks, top_ids, top = (tensor.tolist() for tensor in self._scores.wait())
        found, first = [], 0
        for span in self._spans:
            wanted = span.request.params.prompt_logprobs or 0
            tokens = []
            for row, token_id in enumerate(span.token_ids, first):
                logprobs = dict(zip(top_ids[row][:wanted], top[row][:wanted], strict=True))
                logprobs[token_id] = own[row]
                tokens.append(PromptToken(token_id, ranks[row], logprobs))
            found.append(ScoredTokens(span.request, span.start, tokens))
            first += len(span.token_ids)
        return found


def _spans(step: Step) -> Sequence[_Span]:
    spans, place = [], 0
    for row in step.rows:
        if row.scores:
            first, end = row.start + 1, min(row.start + row.count + 1, row.request.prompt_tokens)
            if first < end:
                spans.append(_Span(row.request, first, row.request.tokens[first:end], place))
        place += row.count
    return spans


def _scored(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """For each row: its token's log-probability and rank, and the likeliest tokens with theirs."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(-1, token_ids[:, None])
    top = logits.topk(num_top)
    ranks = (logits > own).sum(-1) + 1
    return (own - total).squeeze(-1), ranks, top.indices, top.values - total
