"""The costs of tokens: the GPU time to compute them, and the time to load them from memory or disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.simulate.shapes import Gpu, Shape

USED_SHARE = 0.5
"""The share of a GPU's peak FLOPS that a prefill reaches."""


@dataclass(frozen=True, slots=True)
class Costs:
    """`prefill_tokens_per_s`, if measured, replaces the estimate from the GPU's FLOPS."""

    shape: Shape
    gpu: Gpu
    disk_bytes_per_s: float
    prefill_tokens_per_s: float | None = None

    def prefill_s(self, first: int, end: int) -> float:
        """GPU time for the tokens from `first` to `end` of a prompt; later tokens take longer."""
        if self.prefill_tokens_per_s is not None:
            return (end - first) / self.prefill_tokens_per_s
        return self.shape.prefill_flops(first, end) / (self.gpu.flops * USED_SHARE)

    def rest_s(self, found: int, num_tokens: int) -> float:
        """GPU time to compute the rest of a prompt with `found` cached tokens, at least its last token."""
        return self.prefill_s(min(found, num_tokens - 1), num_tokens) if num_tokens else 0.0

    def load_s(self, num_bytes: float, *, from_disk: bool) -> float:
        """Time to load; a load from disk passes through host memory, so it is never faster than that."""
        host = self.gpu.host_bytes_per_s
        return num_bytes / (min(host, self.disk_bytes_per_s) if from_disk else host)

    def is_worth_loading(self, first: int, end: int, num_bytes: float) -> bool:
        """Whether loading from disk is no slower than computing. Otherwise tokens are computed, as engines do."""
        return self.load_s(num_bytes, from_disk=True) <= self.prefill_s(first, end)
