"""What a token costs: the GPU's time to compute it, and the time to load it from memory or from disk."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.simulate.shapes import Gpu, Shape

USED_SHARE = 0.5
"""Of a GPU's products that a prefill gets done."""


@dataclass(frozen=True, slots=True)
class Costs:
    """`prefill_tokens_per_s`, if measured, takes the place of the GPU's products."""

    shape: Shape
    gpu: Gpu
    disk_bytes_per_s: float
    prefill_tokens_per_s: float | None = None

    def prefill_s(self, first: int, end: int) -> float:
        """The GPU's time for the tokens from `first` to `end` of a prompt: later ones take longer."""
        if self.prefill_tokens_per_s is not None:
            return (end - first) / self.prefill_tokens_per_s
        return self.shape.prefill_flops(first, end) / (self.gpu.flops * USED_SHARE)

    def rest_s(self, found: int, num_tokens: int) -> float:
        """To compute a prompt of which `found` tokens are there: its last token at least."""
        return self.prefill_s(min(found, num_tokens - 1), num_tokens) if num_tokens else 0.0

    def load_s(self, num_bytes: float, *, from_disk: bool) -> float:
        """What comes from disk comes through the host's memory, so it is no faster than that."""
        host = self.gpu.host_bytes_per_s
        return num_bytes / (min(host, self.disk_bytes_per_s) if from_disk else host)

    def is_worth_loading(self, first: int, end: int, num_bytes: float) -> bool:
        """From disk: what would be slower to load than to compute is computed, as engines do."""
        return self.load_s(num_bytes, from_disk=True) <= self.prefill_s(first, end)
