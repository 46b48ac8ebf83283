"""Two C processes and one Python process at work at once, killed at any moment: no wrong byte, nothing left behind."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import pytest

from kvtier.client.client import CacheClient
from kvtier.testing.servers import cache_server
from tests.support.actors import LAYOUT, NOTHING_HELD, Actor, actor, chain, held, open_client, payload
from tests.support.c_programs import CProgram, c_actor
from tests.support.waiting import wait_until

_NUM_PROMPTS, _NUM_BLOCKS = 12, 24
_MIN_KILLED = 8
_MEMORY = str(160 * LAYOUT.slot_bytes)


def _counts(line: str) -> dict[str, int]:
    words = line.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def _start_c(stack: contextlib.ExitStack, programs: Path, address: str, seed: int, seconds: float) -> CProgram:
    program = stack.enter_context(c_actor(programs, address))
    program.say(f"mix {seed} {round(seconds) + 1} {_NUM_PROMPTS} {_NUM_BLOCKS}")
    return program


def _start_python(stack: contextlib.ExitStack, address: str, seed: int, seconds: float) -> Actor:
    started = stack.enter_context(
        actor(
            "mix",
            address=address,
            token=None,
            seed=seed,
            seconds=seconds + 1,
            num_prompts=_NUM_PROMPTS,
            num_blocks=_NUM_BLOCKS,
            may_fail=False,
        )
    )
    assert started.hear() == {"ready": True}
    started.go_on()
    return started


@pytest.mark.parametrize("seconds", [6.0, pytest.param(40.0, marks=pytest.mark.slow)])
def test_processes_that_are_killed_leave_nothing_and_spoil_nothing(programs: Path, seconds: float) -> None:
    rng = random.Random(7)
    with cache_server(memory=_MEMORY) as server, open_client(server.unix) as watcher, contextlib.ExitStack() as stack:
        until = time.monotonic() + seconds
        living = [_start_c(stack, programs, server.unix, seed, seconds) for seed in (1, 2)]
        python = _start_python(stack, server.unix, 3, seconds)
        num_killed = 0
        while time.monotonic() < until or num_killed < _MIN_KILLED:
            time.sleep(rng.uniform(0.05, 0.4))
            seed = 10 + num_killed
            left_s = max(0.0, until - time.monotonic())
            if rng.random() < 0.2:
                python.send_signal(signal.SIGKILL)
                python = _start_python(stack, server.unix, seed, left_s)
            else:
                index = rng.randrange(2)
                living[index].kill()
                living[index] = _start_c(stack, programs, server.unix, seed, left_s)
            num_killed += 1
        heard = [_counts(program.hear()) for program in living]
        heard.append({name: int(str(value)) for name, value in python.hear().items()})

        assert [each["wrong"] for each in heard] == [0, 0, 0]
        assert [each["failures"] for each in heard] == [0, 0, 0]
        assert sum(each["read"] for each in heard) > 0
        wait_until(lambda: held(watcher) == NOTHING_HELD)
        _check_all_that_is_cached(watcher)


def _check_all_that_is_cached(watcher: CacheClient) -> None:
    """Whatever a killed process had begun to write is not there, and what is there is whole."""
    for seed in range(_NUM_PROMPTS):
        for block_hash in chain(seed, _NUM_BLOCKS):
            with watcher.match([block_hash]) as lease:
                for view in lease.views():
                    assert bytes(view) == payload(block_hash)
