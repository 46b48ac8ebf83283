"""Many client processes at full speed on an arena too small for them."""

from __future__ import annotations

import contextlib

import pytest

from kvtier.testing.servers import cache_server
from tests.support.actors import LAYOUT, NOTHING_HELD, Actor, actor, anonymous_bytes, held, open_client
from tests.support.waiting import wait_until

_NUM_CLIENTS = 32
_NUM_PROMPTS = 64
_PROMPT_BLOCKS = 24
_MEMORY = _NUM_PROMPTS * _PROMPT_BLOCKS * LAYOUT.slot_bytes // 5
_MAX_GROWTH_BYTES = 24 << 20


@pytest.mark.slow
def test_32_clients_see_no_error_and_no_wrong_byte_for_ten_seconds() -> None:
    _run_clients(seconds=10)


@pytest.mark.soak
def test_32_clients_see_no_error_and_no_wrong_byte_for_a_minute() -> None:
    _run_clients(seconds=60)


def _run_clients(seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(cache_server("--max-connections", "400", memory=str(_MEMORY), tcp=True))
        watcher = stack.enter_context(open_client(server.unix, timeout_s=20.0))
        actors = [stack.enter_context(_mixer(server, seed, seconds)) for seed in range(_NUM_CLIENTS)]
        for each in actors:
            assert each.hear() == {"ready": True}
        for each in actors:
            each.go_on()
        wait_until(lambda: watcher.stats()["evicted_blocks"] > 1000)  # type: ignore[operator]
        warm_bytes = anonymous_bytes(server)

        heard = [each.hear() for each in actors]
        assert [each.wait() for each in actors] == [0] * _NUM_CLIENTS

        grown_bytes = anonymous_bytes(server) - warm_bytes
        assert [each["wrong"] for each in heard] == [0] * _NUM_CLIENTS
        assert [each["failures"] for each in heard] == [0] * _NUM_CLIENTS
        for word in ("read", "stored", "dropped"):
            assert sum(each[word] for each in heard) > _NUM_CLIENTS, f"{word} next to nothing"  # type: ignore[misc]
        wait_until(lambda: held(watcher) == NOTHING_HELD)
        wait_until(lambda: watcher.stats()["clients"] == 1)
        stats = watcher.stats()
        assert stats["used_bytes"] <= stats["memory_bytes"]  # type: ignore[operator]
        assert grown_bytes < _MAX_GROWTH_BYTES


def _mixer(server: object, seed: int, seconds: float) -> contextlib.AbstractContextManager[Actor]:
    """Half of the clients come over the Unix socket, half over TCP."""
    is_local = seed % 2 == 0
    return actor(
        "mix",
        address=server.unix if is_local else server.tcp,  # type: ignore[attr-defined]
        token=None if is_local else server.token,  # type: ignore[attr-defined]
        seed=seed,
        seconds=seconds,
        num_prompts=_NUM_PROMPTS,
        num_blocks=_PROMPT_BLOCKS,
        may_fail=False,
    )
