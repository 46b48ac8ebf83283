from __future__ import annotations

import base64
from typing import Any

from kvtier.cacheserver.prompt_log import PromptLog
from tests.support.prompt_traffic import hashed

SPACE = bytes(32)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fetched(log: PromptLog, first: int) -> tuple[int, list[Any]]:
    page: dict[str, Any] = log.read(first)
    return page["first"], page["prompts"]


def test_nothing_is_kept_before_somebody_wants_it() -> None:
    log = PromptLog()
    log.note(SPACE, 16, hashed((1, 2)))

    assert fetched(log, 1) == (1, [])


def test_prompts_are_fetched_in_order_and_once() -> None:
    clock = Clock()
    log = PromptLog(clock=clock)
    log.read(1)
    log.note(SPACE, 16, hashed((1, 2)))
    log.note(SPACE, 16, hashed((3,)))

    keys = [base64.b64encode(b"".join(hashed((number,))[:8] for number in part)).decode() for part in ((1, 2), (3,))]
    assert fetched(log, 1) == (1, [[100.0, SPACE.hex(), 16, part] for part in keys])
    assert fetched(log, 3) == (3, [])


def test_the_newest_prompts_are_kept_and_a_reader_sees_that_some_are_lost() -> None:
    log = PromptLog(max_bytes=3000)
    log.read(1)
    for number in range(50):
        log.note(SPACE, 16, hashed((number,)))

    first, prompts = fetched(log, 1)
    assert first == 51 - len(prompts)
    assert 5 <= len(prompts) <= 12


def test_nothing_is_kept_once_nobody_reads_any_more() -> None:
    clock = Clock()
    log = PromptLog(clock=clock)
    log.read(1)
    log.note(SPACE, 16, hashed((1,)))
    clock.now += 61
    log.note(SPACE, 16, hashed((2,)))

    assert not log.is_wanted
    assert fetched(log, 1) == (2, [])
