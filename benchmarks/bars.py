"""Compares figures with their bars."""

from __future__ import annotations

from collections.abc import Mapping


def missed(figures: Mapping[str, float], bars: Mapping[str, str]) -> list[str]:
    """The figures that miss their bar, a text like "<= 1.4", or were not measured."""
    return [name for name, bar in bars.items() if name not in figures or not is_met(figures[name], bar)]


def is_met(value: float, bar: str) -> bool:
    sign, limit = bar.split()
    return value <= float(limit) if sign == "<=" else value >= float(limit)
