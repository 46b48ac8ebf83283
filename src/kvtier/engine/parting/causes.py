"""Finds why two prompts diverge: patterns over a little text on both sides, and the order of tools. Any thread.

Text is searched only within `MAX_CHARACTERS` of the place, and every pattern is bounded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from kvtier.tiers.parting import Cause

MAX_CHARACTERS = 64
_LINE_CHARACTERS = 256
_MIN_SAME = 32

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_DATES = tuple(
    re.compile(pattern, re.ASCII | re.IGNORECASE)
    for pattern in (
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?)?",
        r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}",
        r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?",
        rf"\b\d{{1,2}}(?:st|nd|rd|th)?\.? {_MONTH}(?:,? \d{{4}})?",
        rf"\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?",
        rf"\b{_MONTH} \d{{4}}",
        r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b",
        r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b",
        r"\b1\d{9}(?:\d{3})?(?:\.\d{1,9})?\b",
    )
)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9_-]{8,128}")
_NUMBER = re.compile(r"\d{1,128}")
_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9]{0,31}(?:-[A-Za-z0-9]{1,32}){1,6}: ?")
_REASONING = ("<think>", "<thinking>", "<|channel|>analysis", "[THINK]")
_MIN_HEX = 8
_MIN_MIXED = 12

ToolMarks = tuple[tuple[bytes, bytes], ...]


def text_causes(before: str, recorded: str, now: str) -> list[Cause]:
    """The causes for two texts behind a common one. A pattern counts if it touches the point of divergence in both."""
    shared = _common_text(recorded[:MAX_CHARACTERS], now[:MAX_CHARACTERS])
    is_long = len(shared) >= _MIN_SAME and len(shared) == min(len(recorded), len(now), MAX_CHARACTERS)
    if is_long or recorded == now:
        return [Cause.SAME_TEXT]
    line = (before + shared)[-_LINE_CHARACTERS:].rpartition("\n")[2]
    before = (before + shared)[-MAX_CHARACTERS:]
    sides = [before + side[len(shared) :][:MAX_CHARACTERS] for side in (recorded, now)]
    place = len(before)
    causes = [Cause.HEADER] if _HEADER.match(line) else []
    if any(all(_at(pattern, side, place) for side in sides) for pattern in _DATES):
        causes.append(Cause.DATE)
    elif all(_is_id_at(side, place) for side in sides):
        causes.append(Cause.ID)
    elif all(_at(_NUMBER, side, place) for side in sides):
        causes.append(Cause.NUMBER)
    return causes


def lacks_reasoning(recorded: str, now: str) -> bool:
    """Whether an answer began with reasoning that its repetition lacks."""
    return recorded.lstrip().startswith(_REASONING) and not now.lstrip().startswith(_REASONING)


def tool_marks(tools: Sequence[Mapping[str, object]]) -> ToolMarks:
    """Two digests of each tool: as it came, and with its keys sorted."""
    return tuple(
        (_digest(msgspec.json.encode(tool)), _digest(msgspec.json.encode(tool, order="sorted"))) for tool in tools
    )


def tool_causes(recorded: ToolMarks, now: ToolMarks) -> list[Cause]:
    """Empty if the tools are the same, or one of the prompts has none."""
    if recorded == now or not recorded or not now:
        return []
    if sorted(one for one, _ in recorded) == sorted(one for one, _ in now):
        return [Cause.TOOLS_REORDERED]
    sorted_keys = [one for _, one in recorded], [one for _, one in now]
    if sorted(sorted_keys[0]) != sorted(sorted_keys[1]):
        return [Cause.TOOLS_CHANGED]
    others = [Cause.TOOLS_REORDERED] if sorted_keys[0] != sorted_keys[1] else []
    return [Cause.TOOL_KEYS_REORDERED, *others]


def _common_text(left: str, right: str) -> str:
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return left[:number]
    return min(left, right, key=len)


def _at(pattern: re.Pattern[str], text: str, place: int) -> str:
    """The pattern's match that touches the place; empty if there is none."""
    return next((found[0] for found in pattern.finditer(text) if found.start() <= place <= found.end()), "")


def _is_id_at(text: str, place: int) -> bool:
    if _at(_UUID, text, place):
        return True
    word = _at(_WORD, text, place)
    if not any(character.isdigit() for character in word):
        return False
    is_hex = len(word) >= _MIN_HEX and not word.strip("0123456789abcdefABCDEF")
    is_mixed = len(word) >= _MIN_MIXED and any(character.isalpha() for character in word)
    return (is_hex and not word.isdigit()) or is_mixed


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
