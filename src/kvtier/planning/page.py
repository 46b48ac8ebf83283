"""A plan as one HTML file with curves (inline SVG), tables and advice. It loads no other files."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.planning.plan import Effect, Plan, PlanPoint, format_hours
from kvtier.sizes import format_size

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 40
_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
       color: #1f2937; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .2rem .8rem; text-align: right; }
tr + tr { border-top: 1px solid #d1d5db; } .advice { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: currentColor; } .grid { stroke: #9ca3af; stroke-width: .5; opacity: .5; }
@media (prefers-color-scheme: dark) { body { color: #e5e7eb; background: #111827; } }
"""


@dataclass(frozen=True, slots=True)
class _Line:
    label: str
    values: Sequence[tuple[int, float]]
    """Sizes in bytes, each with its value."""


def page_of(plan: Plan) -> str:
    """The text of the HTML file."""
    parts = [f"<h1>{html.escape(plan.title)}</h1>"]
    parts += [f'<p class="advice">{html.escape(sentence)}</p>' for sentence in plan.advice]
    parts.append(_section("Memory", plan.by_memory, plan.gpu, lambda point: point.memory_bytes))
    if plan.by_disk:
        memory = format_size(plan.by_disk[0].memory_bytes)
        parts.append(_section(f"Disk below {memory} of memory", plan.by_disk, plan.gpu, lambda point: point.disk_bytes))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in plan.notes)
    parts.append(f"<h2>Assumptions</h2><ul>{notes}</ul>")
    title = html.escape(plan.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _section(title: str, points: Sequence[PlanPoint], gpu: str, size_of: Callable[[PlanPoint], int]) -> str:
    kinds: list[tuple[str, Callable[[PlanPoint], Effect | None]]] = [
        ("LRU", lambda point: point.lru),
        ("adaptive", lambda point: point.adaptive),
    ]
    shares, ttft, saved = [], [], []
    for label, effect_of in kinds:
        effects = [(size_of(point), effect) for point in points if (effect := effect_of(point)) is not None]
        if not effects:
            continue
        shares.append(_Line(label, [(size, effect.hit_share) for size, effect in effects]))
        ttft.append(_Line(f"{label}, mean", [(size, effect.mean_ttft_s) for size, effect in effects]))
        late = [(size, effect.late_ttft_s) for size, effect in effects if effect.late_ttft_s is not None]
        if late:
            ttft.append(_Line(f"{label}, p90", late))
        saved.append(_Line(label, [(size, effect.saved_gpu_s / 3600) for size, effect in effects]))
    return "\n".join(
        [
            f"<h2>{html.escape(title)}</h2>",
            _chart("share of prompt tokens that hit", shares, lambda value: f"{100 * value:.0f}%", 1.0),
            _chart("time to first token", ttft, lambda value: f"{value:.2g} s", None),
            _chart(f"{gpu} hours a day saved", saved, format_hours, None),
            _table(points, gpu, size_of),
        ]
    )


def _chart(title: str, lines: Sequence[_Line], show: Callable[[float], str], top: float | None) -> str:
    sizes = sorted({size for line in lines for size, _ in line.values})
    top = top or max((value for line in lines for _, value in line.values), default=0.0) or 1.0
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])

    def across(size: int) -> float:
        share = (math.log2(size) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for step in range(5):
        value = top * step / 4
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{html.escape(show(value))}</text>'
        )
    for size in sizes[:: max(1, len(sizes) // 6)]:
        label = html.escape(format_size(size))
        parts.append(f'<text x="{across(size):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for line, colour in zip(lines, _COLOURS, strict=False):
        places = " ".join(f"{across(size):.1f},{up(value):.1f}" for size, value in line.values)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    legend = ", ".join(
        f'<tspan style="fill:{colour}">{html.escape(line.label)}</tspan>'
        for line, colour in zip(lines, _COLOURS, strict=False)
    )
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{html.escape(title)}: {legend}</text></svg>')
    return "".join(parts)


def _table(points: Sequence[PlanPoint], gpu: str, size_of: Callable[[PlanPoint], int]) -> str:
    heads = ["size"]
    for policy in ("LRU", "adaptive"):
        heads += [f"{what} ({policy})" for what in ("hits", "TTFT mean", "TTFT p90", f"{gpu} hours/day saved")]
    rows = [[format_size(size_of(point)), *_cells(point.lru), *_cells(point.adaptive)] for point in points]
    shown = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(row[column])}</td>" for column in shown) + "</tr>" for row in rows
    )
    return (
        "<table><tr>" + "".join(f"<th>{html.escape(heads[column])}</th>" for column in shown) + f"</tr>{body}</table>"
    )


def _cells(effect: Effect | None) -> list[str]:
    if effect is None:
        return ["", "", "", ""]
    late = "" if effect.late_ttft_s is None else f"{effect.late_ttft_s:.3f} s"
    saved = format_hours(effect.saved_gpu_s / 3600)
    return [f"{100 * effect.hit_share:.1f}%", f"{effect.mean_ttft_s:.3f} s", late, saved]
