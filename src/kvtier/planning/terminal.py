"""A plan as text: tables with a bar for each share of hits, the advice and its assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.planning.plan import Effect, Plan, PlanPoint, format_hours
from kvtier.sizes import format_size

_BAR = 16
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def lines_of(plan: Plan) -> Iterator[str]:
    yield plan.title
    yield ""
    yield from _table(plan.by_memory, "memory", plan.gpu)
    if plan.by_disk:
        yield ""
        yield f"with {format_size(plan.by_disk[0].memory_bytes)} of memory and a disk below it:"
        yield from _table(plan.by_disk, "disk", plan.gpu)
    yield ""
    for sentence in plan.advice:
        yield f"=> {sentence}"
    yield ""
    for note in plan.notes:
        yield f"- {note}"


def bar(share: float, width: int = _BAR) -> str:
    """A share as a bar, `width` characters long at 100%."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _table(points: Sequence[PlanPoint], what: str, gpu: str) -> Iterator[str]:
    has_adaptive = any(point.adaptive is not None for point in points)
    cells = _cells(points[0].lru, is_head=True)
    width = len("  ".join(["hits".ljust(_BAR + 7), *cells]))
    if has_adaptive:
        yield "  ".join([" " * 9, "LRU".ljust(width), "adaptive, simulated"]).rstrip()
    heads = [what.rjust(9), ("hits" if has_adaptive else "hits (LRU)").ljust(_BAR + 7), *cells]
    yield "  ".join([*heads, *(["hits".rjust(6), *cells] if has_adaptive else [])]).rstrip()
    for point in points:
        size = point.disk_bytes if what == "disk" else point.memory_bytes
        shown = [format_size(size).rjust(9), f"{bar(point.lru.hit_share)} {_percent(point.lru)}", *_cells(point.lru)]
        if point.adaptive is not None:
            shown += [_percent(point.adaptive), *_cells(point.adaptive)]
        yield "  ".join(shown).rstrip()
    yield f"h/day: {gpu} hours saved per day"


def _percent(effect: Effect) -> str:
    return f"{100 * effect.hit_share:5.1f}%"


def _cells(effect: Effect, *, is_head: bool = False) -> list[str]:
    """The cells beside the share of hits."""
    mean, late, hours = "TTFT mean", "p90", "h/day"
    if not is_head:
        mean, hours = _seconds(effect.mean_ttft_s), format_hours(effect.saved_gpu_s / 3600)
        late = "" if effect.late_ttft_s is None else _seconds(effect.late_ttft_s)
    return [mean.rjust(9), *([] if effect.late_ttft_s is None else [late.rjust(8)]), hours.rjust(6)]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
