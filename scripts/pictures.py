"""Draws the pictures of docs/architecture.md: the processes of a host, and one block's way. Plain SVG, no library.

python scripts/pictures.py            write docs/pictures/*.svg
python scripts/pictures.py --check    fail if they are not what this script draws
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
_FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and lines of text. `tone` is its fill."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: Sequence[str] = ()
    tone: str = "#eef3fb"


@dataclass(frozen=True, slots=True)
class Arrow:
    """From one point to another, with a label at its middle."""

    start: tuple[int, int]
    end: tuple[int, int]
    label: str = ""
    shift: tuple[int, int] = (0, -6)


def draw(width: int, height: int, boxes: Sequence[Box], arrows: Sequence[Arrow]) -> str:
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>",
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
        "<path d='M0,0 L8,4 L0,8 z' fill='#345'/></marker></defs>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
    ]
    for box in boxes:
        parts.append(
            f"<rect x='{box.x}' y='{box.y}' width='{box.width}' height='{box.height}' rx='6' fill='{box.tone}' "
            "stroke='#678'/>"
        )
        parts.append(_text(box.x + 10, box.y + 20, box.title, 14, is_bold=True))
        parts += [_text(box.x + 10, box.y + 40 + 17 * row, line, 12) for row, line in enumerate(box.lines)]
    for arrow in arrows:
        (x1, y1), (x2, y2) = arrow.start, arrow.end
        parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='#345' stroke-width='1.5' marker-end='url(#tip)'/>"
        )
        if arrow.label:
            middle = ((x1 + x2) // 2 + arrow.shift[0], (y1 + y2) // 2 + arrow.shift[1])
            parts.append(_text(*middle, arrow.label, 11, anchor="middle"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: int, y: int, text: str, size: int, *, is_bold: bool = False, anchor: str = "start") -> str:
    weight = " font-weight='bold'" if is_bold else ""
    return f"<text x='{x}' y='{y}' {_FONT} font-size='{size}' text-anchor='{anchor}'{weight}>{escape(text)}</text>"


def processes() -> str:
    boxes = [
        Box(20, 20, 860, 60, "kvtier serve: the supervisor", ["starts the parts in order, starts again what died"]),
        Box(20, 130, 230, 130, "HTTP", ["OpenAI and Ollama APIs", "one event loop", "the only asyncio"], "#fdf6e3"),
        Box(
            330,
            130,
            250,
            150,
            "engine (one per GPU share)",
            [
                "one thread does the steps",
                "4 match, 4 load, 1 stores, 1 pushes",
                "GPU memory: the KV arena",
                "host tier: own memory",
            ],
        ),
        Box(
            660,
            130,
            220,
            150,
            "cache server",
            ["a thread per connection", "shared arena (memfd)", "disk: writers, readers", "no torch"],
            "#eaf7ea",
        ),
        Box(330, 370, 250, 70, "vLLM with the plug-in", ["scheduler and workers, transfer inside"], "#f6eefb"),
        Box(20, 370, 230, 70, "programs with the client", ["kvtier.connect, Vineyard's KVCache"], "#f6eefb"),
        Box(660, 370, 220, 70, "folder on disk", ["blocks.kvtier, records.kvtier"], "#f4f4f4"),
    ]
    arrows = [
        Arrow((135, 80), (135, 130)),
        Arrow((455, 80), (455, 130)),
        Arrow((770, 80), (770, 130)),
        Arrow((250, 190), (330, 190), "Unix socket"),
        Arrow((580, 180), (660, 180), "Unix socket", (0, -8)),
        Arrow((580, 230), (660, 230), "DMA, no copy", (0, -8)),
        Arrow((580, 390), (690, 280), "the same", (36, 16)),
        Arrow((200, 370), (660, 270), "Unix socket or TCP", (-110, 8)),
        Arrow((790, 280), (790, 370), "direct I/O", (34, 4)),
    ]
    return draw(900, 460, boxes, arrows)


def block() -> str:
    boxes = [
        Box(20, 60, 150, 90, "tokens", ["hashed in chains", "blocks/hashing"], "#fdf6e3"),
        Box(
            230,
            20,
            190,
            170,
            "Prefetch",
            ["UNASKED, MATCHING", "LOADING, MEETING", "FINISHED", "", "verdict: WAIT,", "compute n, READY"],
        ),
        Box(490, 20, 180, 70, "matching", ["tiers/hierarchy, leases"]),
        Box(490, 120, 180, 70, "decision", ["load or compute, by speed"]),
        Box(490, 220, 180, 70, "loader, copier", ["in place, or by units"]),
        Box(490, 320, 180, 70, "storer, copier", ["reserve, write, commit"]),
        Box(
            740,
            20,
            180,
            370,
            "tiers",
            ["host memory", "", "cache server:", "shared arena, disk", "", "servers over TCP", "(pusher)"],
            "#eaf7ea",
        ),
        Box(
            230,
            250,
            190,
            140,
            "device",
            ["blocks of the pool", "a step computes", "what is missing", "full blocks are offered"],
            "#f6eefb",
        ),
    ]
    arrows = [
        Arrow((170, 105), (230, 105), "begin"),
        Arrow((420, 55), (490, 55), "ask"),
        Arrow((670, 55), (740, 55)),
        Arrow((420, 150), (490, 150), "plan"),
        Arrow((740, 255), (670, 255)),
        Arrow((490, 265), (420, 265), "load"),
        Arrow((325, 190), (325, 250), "verdict", (28, 4)),
        Arrow((420, 355), (490, 355), "filled"),
        Arrow((670, 355), (740, 355)),
    ]
    return draw(940, 410, boxes, arrows)


PICTURES = {"processes.svg": processes, "block.svg": block}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    stale = []
    for name, make in PICTURES.items():
        path, picture = FOLDER / name, make()
        if arguments.check:
            stale += [] if path.exists() and path.read_text() == picture else [name]
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(picture)
    if stale:
        print(f"run scripts/pictures.py: {', '.join(stale)} is not what it draws")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
