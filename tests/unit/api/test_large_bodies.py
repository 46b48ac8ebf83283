"""Processes that read large bodies: no client keeps the others from them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvtier.api import large_bodies
from kvtier.api.body_messages import OPENAI_COMPLETION, BodyRefused, ReadBody
from kvtier.api.http_error import HttpError
from kvtier.api.large_bodies import LargeBodies
from kvtier.api.limits import MAX_UNREAD_BODIES_BYTES, QUICK_BODY_BYTES
from kvtier.testing.signals import send_signal
from tests.support.waiting import LIMIT_S

_BODY = b'{"model":"none","prompt":"a"}' + b" " * 40_000


def question(num_bytes: int = len(_BODY)) -> ReadBody:
    return ReadBody(OPENAI_COMPLETION, num_bytes, [])


def with_bodies(work: Callable[[LargeBodies], Awaitable[None]]) -> None:
    async def run() -> None:
        bodies = LargeBodies()
        try:
            async with asyncio.timeout(LIMIT_S):
                await work(bodies)
        finally:
            await bodies.close()

    asyncio.run(run())


async def is_read(bodies: LargeBodies) -> bool:
    reply = await bodies.read(question(), [_BODY])
    return isinstance(reply, BodyRefused) and reply.status == 404


async def given_up(*reads: asyncio.Task[Any]) -> None:
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


class Started:
    """Counts processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        start = subprocess.Popen

        def counting(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
            self.processes.append(start(*args, **kwargs))
            return self.processes[-1]

        monkeypatch.setattr(large_bodies.subprocess, "Popen", counting)


def endless_read(bodies: LargeBodies, num_bytes: int = QUICK_BODY_BYTES + 1) -> asyncio.Task[Any]:
    """A process reads a body whose end never comes."""
    return asyncio.create_task(bodies.read(question(num_bytes), [b" "]))


def test_a_long_prompt_does_not_wait_for_bodies_of_megabytes() -> None:
    async def work(bodies: LargeBodies) -> None:
        huge = [endless_read(bodies) for _ in range(6)]
        await asyncio.sleep(0)

        assert await is_read(bodies)
        assert not any(one.done() for one in huge)
        await given_up(*huge)

    with_bodies(work)


def test_clients_that_leave_cost_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)

    async def work(bodies: LargeBodies) -> None:
        for _ in range(20):
            leaving = asyncio.create_task(bodies.read(question(), [_BODY]))
            await asyncio.sleep(0.002)
            await given_up(leaving)

        assert await is_read(bodies)

    with_bodies(work)
    assert len(started.processes) <= 2


def test_a_huge_body_of_a_client_that_left_is_given_up() -> None:
    async def work(bodies: LargeBodies) -> None:
        for _ in range(2):
            huge = [endless_read(bodies) for _ in range(2)]
            await asyncio.sleep(0.01)
            await given_up(*huge)

        reply = await bodies.read(question(QUICK_BODY_BYTES + 1), [b" " * (QUICK_BODY_BYTES + 1)])
        assert isinstance(reply, BodyRefused)

    with_bodies(work)


def test_bodies_that_wait_to_be_read_have_a_bound() -> None:
    async def work(bodies: LargeBodies) -> None:
        huge = [endless_read(bodies, MAX_UNREAD_BODIES_BYTES // 2) for _ in range(4)]
        await asyncio.sleep(0)

        with pytest.raises(HttpError, match="waiting to be read") as raised:
            await bodies.read(question(QUICK_BODY_BYTES + 1), [])
        assert raised.value.status == 429
        assert raised.value.headers["Retry-After"]
        assert await is_read(bodies)
        await given_up(*huge)

    with_bodies(work)


def test_the_event_loop_goes_on_while_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    monkeypatch.setattr(large_bodies, "_END_S", 0.5)

    async def work(bodies: LargeBodies) -> None:
        assert await is_read(bodies)
        send_signal(started.processes[0].pid, signal.SIGSTOP)  # it does not see that its socket is closed
        closing = asyncio.create_task(bodies.close())
        num_turns = 0
        while not closing.done():
            num_turns += 1
            await asyncio.sleep(0.001)

        assert num_turns > 10
        assert started.processes[0].returncode == -signal.SIGKILL

    with_bodies(work)
