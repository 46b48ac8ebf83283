"""The rows of a sampling step as device tensors: built when the rows change, used while they stay the same.

The runner's thread builds it with one copy to the device. A feature that no row uses is absent (`None`), so the sampler
decides on the host what it can leave out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.sampling_params import SamplingParams
from kvtier.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The sampler's record of one request. Its draws depend only on `seed` and the output position."""

    params: SamplingParams
    seed: int
    penalty_slot: int | None


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows that are drawn at random. Greedy rows among them are drawn too, but the draw is ignored."""

    temperature: torch.Tensor
    """`(rows, 1)`; 1 for greedy rows."""
    seeds: torch.Tensor
    is_greedy: torch.Tensor | None
    log_min_p: torch.Tensor | None
    """`(rows, 1)`: how far below the best score a score may lie; -inf for rows without `min_p`."""
    truncation: Truncation | None


@dataclass(frozen=True, slots=True)
class Truncation:
    """The rows with `top_k` or `top_p`."""

    rows: torch.Tensor
    top_k: torch.Tensor
    """`(rows, 1)`; the size of the vocabulary for rows without `top_k`."""
    top_p: torch.Tensor
    max_kept: int
    """The largest `top_k`: no more scores need be sorted."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows with penalties, and the slots where `PenaltyState` counts their tokens."""

    rows: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True, slots=True)
class Suppression:
    """Pairs of a row and a token that must not come before the row has `min_tokens`."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    min_tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bias:
    """Values added to the logit of a token in a row, each pair once."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """`positions[r]` is the place in row r's output of the token that is sampled next; sampling advances it.

    If all rows are greedy, nothing needs it, and it stays unchanged.
    """

    positions: torch.Tensor
    draws: Draws | None
    penalties: Penalties | None
    suppression: Suppression | None
    bias: Bias | None
    num_logprobs: int | None
    """Alternatives to report with each token's own log-probability; `None` if no row wants any."""

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the likeliest token of unchanged logits, and no log-probabilities are requested."""
        return self.draws is None and not self.changes_logits and self.num_logprobs is None

    @property
    def changes_logits(self) -> bool:
        return self.penalties is not None or self.suppression is not None or self.bias is not None

    @classmethod
    def build(
        cls,
        rows: Sequence[SamplingRow],
        positions: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        device: torch.device,
    ) -> SamplingBatch:
        """Row r of the logits belongs to `rows[r]`, with `positions[r]` output tokens, including those in flight."""
        assert len(rows) == len(positions)
        host = _HostArrays(rows, positions, vocab_size, eos_token_ids)
        tensors = dict(zip(host.arrays, upload(list(host.arrays.values()), device), strict=True))
        logprobs = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        return cls(
            positions=tensors["positions"],
            draws=_draws(host, tensors),
            penalties=_penalties(tensors) if host.has_penalties else None,
            suppression=_suppression(tensors) if host.has_suppression else None,
            bias=_bias(tensors) if host.has_bias else None,
            num_logprobs=min(max(logprobs), vocab_size) if logprobs else None,
        )


class _HostArrays:
    """Everything a batch needs, as arrays to upload, and which parts of it are used by any row."""

    def __init__(
        self, rows: Sequence[SamplingRow], positions: Sequence[int], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        params = [row.params for row in rows]
        self.is_greedy = np.array([one.is_greedy for one in params], bool)
        self.arrays: dict[str, npt.NDArray[np.generic]] = {"positions": np.array(positions, np.int64)}
        self.has_draws = not self.is_greedy.all()
        self.has_min_p = any(one.min_p > 0 and not one.is_greedy for one in params)
        self.cuts = [
            index
            for index, one in enumerate(params)
            if not one.is_greedy and (0 < one.top_k < vocab_size or one.top_p < 1)
        ]
        self.max_kept = max((_top_k(params[index], vocab_size) for index in self.cuts), default=0)
        self._add_draws(rows, vocab_size)
        self._add_penalties(rows)
        self._add_suppression(params, positions, vocab_size, eos_token_ids)
        self._add_bias(params, vocab_size)

    def _add_draws(self, rows: Sequence[SamplingRow], vocab_size: int) -> None:
        params = [row.params for row in rows]
        cut = [params[index] for index in self.cuts]
        self.arrays |= {
            "is_greedy": self.is_greedy,
            "seeds": np.array([row.seed for row in rows], np.int64),
            "temperature": _column([1.0 if one.is_greedy else one.temperature for one in params]),
            "log_min_p": _column([math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params]),
            "cut_rows": np.array(self.cuts, np.int64),
            "top_k": np.array([_top_k(one, vocab_size) for one in cut], np.int64)[:, None],
            "top_p": np.array([one.top_p for one in cut], np.float64)[:, None],
        }

    def _add_penalties(self, rows: Sequence[SamplingRow]) -> None:
        penalised = [(index, row) for index, row in enumerate(rows) if row.penalty_slot is not None]
        self.has_penalties = bool(penalised)
        self.arrays |= {
            "penalty_rows": np.array([index for index, _ in penalised], np.int64),
            "penalty_slots": np.array([row.penalty_slot for _, row in penalised], np.int64),
            "repetition": _column([row.params.repetition_penalty for _, row in penalised]),
            "presence": _column([row.params.presence_penalty for _, row in penalised]),
            "frequency": _column([row.params.frequency_penalty for _, row in penalised]),
        }

    def _add_suppression(
        self,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        pairs = [
            (index, token_id, one.min_tokens)
            for index, (one, position) in enumerate(zip(params, positions, strict=True))
            if position < one.min_tokens
            for token_id in sorted({*one.stop_token_ids, *(() if one.ignore_eos else eos_token_ids)})
            if token_id < vocab_size
        ]
        self.has_suppression = bool(pairs)
        self.arrays["suppressed"] = np.array(pairs, np.int64).reshape(-1, 3).T.copy()

    def _add_bias(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        biased = [
            (index, token_id, value)
            for index, one in enumerate(params)
            for token_id, value in one.logit_bias.items()
            if token_id < vocab_size
        ]
        self.has_bias = bool(biased)
        places = [(index, token_id) for index, token_id, _ in biased]
        self.arrays["biased"] = np.array(places, np.int64).reshape(-1, 2).T.copy()
        self.arrays["bias"] = np.array([value for _, _, value in biased], np.float32)


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k, vocab_size) or vocab_size


def _column(numbers: list[float]) -> npt.NDArray[np.float32]:
    return np.array(numbers, np.float32)[:, None]


def _draws(host: _HostArrays, tensors: dict[str, torch.Tensor]) -> Draws | None:
    if not host.has_draws:
        return None
    truncation = Truncation(tensors["cut_rows"], tensors["top_k"], tensors["top_p"], host.max_kept)
    return Draws(
        temperature=tensors["temperature"],
        seeds=tensors["seeds"],
        is_greedy=tensors["is_greedy"] if host.is_greedy.any() else None,
        log_min_p=tensors["log_min_p"] if host.has_min_p else None,
        truncation=truncation if host.cuts else None,
    )


def _penalties(tensors: dict[str, torch.Tensor]) -> Penalties:
    return Penalties(
        rows=tensors["penalty_rows"],
        slots=tensors["penalty_slots"],
        repetition=tensors["repetition"],
        presence=tensors["presence"],
        frequency=tensors["frequency"],
    )


def _suppression(tensors: dict[str, torch.Tensor]) -> Suppression:
    rows, token_ids, min_tokens = tensors["suppressed"]
    return Suppression(rows, token_ids, min_tokens)


def _bias(tensors: dict[str, torch.Tensor]) -> Bias:
    rows, token_ids = tensors["biased"]
    return Bias(rows, token_ids, tensors["bias"])
