"""Turns logits into tokens on the device: nothing waits for it, and no step's Python work grows with its rows.

A row's token depends on its own logits, parameters, seed and output position, not on the rows beside it: the same
request gets the same tokens in any batch. The order is that of most engines: penalties, bias, suppressed ends, tokens
that a grammar forbids, temperature, min_p, top_k, top_p. Scores that tie with the last one kept are also kept. The
runner's thread calls everything.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.engine.device.penalty_state import PenaltyState
from kvtier.engine.device.randomness import uniform
from kvtier.engine.device.sampling_batch import Draws, SamplingBatch, SamplingRow, Suppression, Truncation
from kvtier.engine.sampling_params import SamplingParams
from kvtier.kernels.backend import argmax_tokens_for, forbid_for

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities under the model's own distribution, before a request's parameters change it."""

    sampled: torch.Tensor
    """`(rows,)`"""
    top_token_ids: torch.Tensor
    """`(rows, num_logprobs)`, the likeliest first."""
    top: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """For the rows `rows`, bit `t % 32` of word `t // 32` is set if token `t` may be sampled. Other rows are free."""

    rows: torch.Tensor
    """`(constrained rows,)` int64"""
    words: torch.Tensor
    """`(constrained rows, words)` int32"""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A step's samples, on the device."""

    token_ids: torch.Tensor
    """`(rows,)` int64"""
    logprobs: Logprobs | None


class Sampler:
    """Samples for one model on one device, and keeps the tokens seen by requests with penalties."""

    def __init__(self, *, vocab_size: int, device: torch.device, eos_token_ids: Sequence[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._penalties = PenaltyState(vocab_size, device)

    def open(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()
    ) -> SamplingRow:
        """Take in a request; pass the result to `close` later. A request without a seed gets one of its own.

        A greedy request draws nothing.
        """
        seed = 0 if params.is_greedy else secrets.randbits(64) if params.seed is None else params.seed
        slot = self._penalties.open(prompt_token_ids, output_token_ids) if params.has_penalties else None
        return SamplingRow(params, _as_signed(seed), slot)

    def close(self, row: SamplingRow) -> None:
        """Forget a request. No batch that holds it may be sampled once another one was taken in."""
        if row.penalty_slot is not None:
            self._penalties.close(row.penalty_slot)

    def batch(self, rows: Sequence[SamplingRow], positions: Sequence[int]) -> SamplingBatch:
        """Rows to sample together, each with the number of its output tokens so far, including those in flight."""
        return SamplingBatch.build(
            rows, positions, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids, device=self._device
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, allowed: AllowedTokens | None = None) -> SampledTokens:
        """A token for every row of `logits`, `(rows, vocab_size)`, which may be overwritten. Computes in float32.

        Afterwards the batch is at the next position, if any row depends on it, and the penalties know the tokens. Of
        equally likely tokens, the one with the lowest id is taken.
        """
        assert logits.shape == (batch.positions.shape[0], self._vocab_size), "the logits are another batch's"
        if batch.is_greedy:
            if allowed is not None:
                forbid_for(logits)(logits, allowed.rows, allowed.words)
            return SampledTokens(argmax_tokens_for(logits)(logits), None)
        logits = logits.float()
        model_logits = logits
        if batch.num_logprobs is not None and (batch.changes_logits or allowed):
            logits = logits.clone()
        if batch.penalties is not None:
            self._penalties.apply(logits, batch.penalties)
        if batch.bias is not None:
            places = (batch.bias.rows, batch.bias.token_ids)
            logits.index_put_(places, logits[places].add_(batch.bias.values))
        if batch.suppression is not None:
            _suppress(logits, batch.suppression, batch.positions)
        if allowed is not None:
            forbid_for(logits)(logits, allowed.rows, allowed.words)
        token_ids = logits.argmax(-1) if batch.draws is None else _draw(logits, batch.draws, batch.positions)
        if batch.penalties is not None:
            self._penalties.record(token_ids, batch.penalties)
        batch.positions.add_(1)
        if batch.num_logprobs is None:
            return SampledTokens(token_ids, None)
        return SampledTokens(token_ids, _logprobs(model_logits, token_ids, batch.num_logprobs))


def _suppress(logits: torch.Tensor, suppression: Suppression, positions: torch.Tensor) -> None:
    places = (suppression.rows, suppression.token_ids)
    is_early = positions[suppression.rows] < suppression.min_tokens
    logits.index_put_(places, logits[places].masked_fill_(is_early, _NEVER))


def _draw(logits: torch.Tensor, draws: Draws, positions: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution at its own number; greedy rows take their best token."""
    scores = logits / draws.temperature
    if draws.log_min_p is not None:
        scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + draws.log_min_p, _NEVER)
    if draws.truncation is not None:
        _truncate(scores, draws.truncation)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    # In float64, the order in which a device adds does not change the sums in any digit that matters.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    targets = uniform(draws.seeds, positions)[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return token_ids if draws.is_greedy is None else torch.where(draws.is_greedy, logits.argmax(-1), token_ids)


def _truncate(scores: torch.Tensor, truncation: Truncation) -> None:
    """Drop, in place, scores below each row's last kept one: of the best `top_k`, those that make up `top_p`."""
    cut = scores[truncation.rows]
    best = _best(cut, truncation.max_kept)
    is_kept = torch.arange(best.shape[-1], device=best.device) < truncation.top_k
    weights = (best - best[:, :1]).exp().masked_fill_(~is_kept, 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    is_kept &= cumulative - weights < truncation.top_p * cumulative[:, -1:]
    last_kept = best.gather(-1, is_kept.sum(-1, keepdim=True).sub_(1).clamp_(min=0))
    scores.index_copy_(0, truncation.rows, cut.masked_fill_(cut < last_kept, _NEVER))


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The largest scores of each row, in order."""
    if count < scores.shape[-1]:
        return scores.topk(count).values
    if scores.device.type == "cpu":
        # torch also sorts the ids, which costs a CPU ten times as much as sorting the scores alone.
        return torch.from_numpy(np.sort(scores.numpy())).flip(-1)
    return scores.sort(descending=True).values


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    total = logits.logsumexp(-1, keepdim=True)
    top = logits.topk(num_top)
    return Logprobs(
        sampled=(logits.gather(-1, token_ids[:, None]) - total).squeeze(-1),
        top_token_ids=top.indices,
        top=top.values - total,
    )


def _as_signed(seed: int) -> int:
    """The int64 with the seed's 64 bits."""
    bits = seed & ((1 << 64) - 1)
    return bits - (1 << 64) if bits >> 63 else bits
