"""Whether a run is good enough."""

from __future__ import annotations

from collections.abc import Mapping


def missed(figures: Mapping[str, float], bars: Mapping[str, str]) -> list[str]:
    """The figures that miss their bar, which is a text like "<= 1.4", or that were not measured at all."""
    return [name for name, bar in bars.items() if name not in figures or not is_met(figures[name], bar)]


def is_met(value: float, bar: str) -> bool:
    sign, limit = bar.split()
    return value <= float(limit) if sign == "<=" else value >= float(limit)
