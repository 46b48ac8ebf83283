"""The metrics of an engine that the page shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.engine.process.messages import MetricFamily
from kvtier.observe import metrics

_SUMS = {
    f"{metrics.ENGINE_SAVED_SECONDS}_total": "saved_s",
    metrics.ENGINE_UNVALUED_TOKENS: "unvalued_tokens",
    metrics.ENGINE_RUNNING_REQUESTS: "running",
    metrics.ENGINE_WAITING_REQUESTS: "waiting",
    metrics.ENGINE_USED_BLOCKS: "used_blocks",
    metrics.ENGINE_HELD_BLOCKS: "held_blocks",
    metrics.ENGINE_BLOCKS: "num_blocks",
}
_CANARY_CHECKS = f"{metrics.ENGINE_CANARY_CHECKS}_total"
_MOVED = {f"{metrics.TIER_LOADED_BYTES}_total": "out", f"{metrics.TIER_STORED_BYTES}_total": "in"}


@dataclass(slots=True)
class EngineNumbers:
    """The numbers of one engine. `moved` has bytes by direction and tier, `canary_checks` counts by result.

    `is_known` is False, and all numbers are 0, if the engine has not answered.
    """

    is_known: bool = False
    saved_s: float = 0.0
    unvalued_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    used_blocks: float = 0.0
    held_blocks: float = 0.0
    num_blocks: float = 0.0
    canary_checks: dict[str, int] = field(default_factory=dict)
    moved: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def of(cls, families: Iterable[MetricFamily]) -> EngineNumbers:
        found = cls()
        for family in families:
            found.is_known = True
            for sample in family.samples:
                if (name := _SUMS.get(sample.name)) is not None:
                    setattr(found, name, getattr(found, name) + sample.value)
                elif sample.name == _CANARY_CHECKS:
                    found.canary_checks[sample.labels.get("result", "")] = round(sample.value)
                elif (direction := _MOVED.get(sample.name)) is not None:
                    place = (direction, sample.labels.get("tier", ""))
                    found.moved[place] = found.moved.get(place, 0.0) + sample.value
        return found
