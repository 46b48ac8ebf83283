"""Rounds of streams that start together: input and output of both sides of the comparison."""

from __future__ import annotations

import random
import statistics
from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`engine` are settings of `EngineConfig`. Every stream of every round has a prompt of its own."""

    engine: dict[str, Any]
    vocab_size: int
    num_streams: int
    input_tokens: int
    output_tokens: int
    num_rounds: int
    seed: int = 0

    def prompts(self, number: int) -> list[list[int]]:
        """Of round `number`; round 0 is for warming up."""
        dice = random.Random(self.seed * 1000 + number)
        return [[dice.randrange(self.vocab_size) for _ in range(self.input_tokens)] for _ in range(self.num_streams)]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The times of its streams, in seconds from their common start."""

    seconds: float
    first_tokens_s: list[float]
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def ttft_s(self) -> float:
        return statistics.median(self.first_tokens_s)
