"""Reads the fields for retention: `prompt_cache_retention`, and `cache_control` with `ttl`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvtier.api.json_body import JsonBody
from kvtier.api.retention import RetentionWish
from kvtier.blocks.retention import MAX_PRIORITY, MAX_TTL_S, MIN_PRIORITY
from kvtier.tiers.retention import MAX_ASKS

_DURATION = re.compile("[0-9]{1,7}[smhd]")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DEFAULT_TTL = "5m"
_EPHEMERAL = "ephemeral"
_IN_MEMORY = ("in_memory", "in-memory")
_DAYS = MAX_TTL_S // 86400


def read_retention(body: JsonBody, marked: Sequence[tuple[float, int | None]] = ()) -> RetentionWish:
    """The fields of OpenAI's APIs, plus the marks of `cache_control`. Raises an `HttpError` that names the field."""
    priority = read_priority(body)
    given = body.text("prompt_cache_retention")
    whole: list[tuple[float, int | None]] = []
    if given is not None and given not in _IN_MEMORY:
        whole = [(read_duration(body, "prompt_cache_retention"), None)]
    parts = needed_parts([*marked, *whole])
    return RetentionWish(parts, priority, is_declined=given in _IN_MEMORY and not parts)


def read_priority(body: JsonBody) -> int | None:
    priority = body.whole("prompt_cache_priority")
    if priority is not None and not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise body.wrong("prompt_cache_priority", f"a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}")
    return priority


def read_cache_control(body: JsonBody) -> float | None:
    """How long to keep the prompt up to here; None without the field. Raises an `HttpError` that names the field."""
    mark = body.inner("cache_control")
    if mark is None:
        return None
    if mark.needed_text("type") != _EPHEMERAL:
        raise mark.wrong("type", _EPHEMERAL)
    return read_duration(mark, "ttl") if mark.has("ttl") else float(_duration_s(_DEFAULT_TTL))


def read_duration(body: JsonBody, name: str) -> float:
    given = body.needed_text(name)
    seconds = _duration_s(given) if _DURATION.fullmatch(given) else 0
    if not 0 < seconds <= MAX_TTL_S:
        raise body.wrong(name, f"a duration such as 5m, 1h or 24h, at most {_DAYS}d")
    return float(seconds)


def _duration_s(text: str) -> int:
    return int(text[:-1]) * _UNITS_S[text[-1]]


def needed_parts(marked: Iterable[tuple[float, int | None]]) -> list[tuple[float, int | None]]:
    """Drop parts that are covered by a part at least as long that lasts at least as long; shortest parts first."""
    furthest: dict[float, int | None] = {}
    for ttl_s, num_messages in marked:
        known = furthest.get(ttl_s, 0)
        furthest[ttl_s] = None if known is None or num_messages is None else max(known, num_messages)
    found: list[tuple[float, int | None]] = []
    reach: int | None = 0
    for ttl_s in sorted(furthest, reverse=True):
        num_messages = furthest[ttl_s]
        if reach is not None and (num_messages is None or num_messages > reach):
            found.append((ttl_s, num_messages))
            reach = num_messages
    return found[:MAX_ASKS]
