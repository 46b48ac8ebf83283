"""Pages that a scheduler asks about: answered later, leased until they are loaded, and never waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import TierUnavailable
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.transfer.page_jobs import page_hashes
from kvtier.transfer.page_lookups import PageLookups
from kvtier.wire.messages import LISTED_DISK, LISTED_DOWN, LISTED_EVICTED, LISTED_MEMORY
from tests.support.waiting import FOR_EVER_S, wait_until

_KEYS = [b"a", b"b", b"c", b"d"]


class _Lease(EmptyLease):
    def __init__(self, server: _Server, count: int) -> None:
        super().__init__(MatchEnd.ALL)
        self._server = server
        self.num_blocks = count
        server.num_held += count

    def release(self) -> None:
        self._server.num_held -= self.num_blocks
        self.num_blocks = 0


class _Server:
    def __init__(self) -> None:
        self.flags: dict[BlockHash, int] = {}
        self.num_held = 0
        self.num_looks = 0
        self.num_waiting = 0
        self.is_gone = False
        self.is_open = threading.Event()
        self.is_open.set()

    def put(self, keys: Sequence[bytes], flags: int = LISTED_MEMORY) -> None:
        self.flags |= dict.fromkeys(page_hashes(keys), flags)

    def look(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[int]:
        self.num_waiting += 1
        assert self.is_open.wait(60)
        self.num_looks += 1
        if self.is_gone:
            raise TierUnavailable("gone")
        return [self.flags.get(one, 0) for one in hashes]

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease:
        return _Lease(self, len(hashes))


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.server = _Server()
        self.lookups = PageLookups(
            self.server, max_held=lambda: 3, patience_s=2.0, held_s=FOR_EVER_S, clock=lambda: self.now
        )

    def answers(self, owner: str = "request", keys: Sequence[bytes] = _KEYS) -> list[bool | None]:
        return [self.lookups.find(key, owner) for key in keys]

    def asked(self, owner: str = "request", keys: Sequence[bytes] = _KEYS) -> list[bool | None]:
        """The answers once there are any."""
        self.answers(owner, keys)
        self.lookups.send()
        wait_until(lambda: None not in self.answers(owner, keys), "answers")
        return self.answers(owner, keys)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.server.is_open.set()
    bench.lookups.close()
    assert not bench.server.num_held


def test_the_first_question_is_answered_later_and_all_of_a_request_are_one_call(bench: Bench) -> None:
    bench.server.put(_KEYS[:1])
    bench.server.put(_KEYS[1:2], LISTED_DISK)
    bench.server.put(_KEYS[2:3], LISTED_EVICTED)

    assert bench.answers() == [None] * 4
    assert bench.asked() == [True, True, False, False]
    assert bench.server.num_looks == 1


def test_what_is_found_is_leased_until_its_load_has_ended(bench: Bench) -> None:
    bench.server.put(_KEYS[:2])
    bench.asked()
    assert bench.server.num_held == 2

    bench.lookups.note_loaded("request", _KEYS[:2], [])

    wait_until(lambda: not bench.server.num_held, "leases given back")
    assert bench.answers() == [True, True, False, False]


def test_pages_of_a_later_load_stay_leased_when_an_earlier_one_ends(bench: Bench) -> None:
    bench.server.put(_KEYS[:3])
    bench.asked(keys=_KEYS[:1])
    bench.asked(keys=_KEYS[:3])
    assert bench.server.num_held == 3

    bench.lookups.note_loaded("request", _KEYS[:2], [])
    wait_until(lambda: bench.server.num_held == 2, "the first lease given back")
    bench.asked("another", _KEYS[3:])  # its answer comes after what the end of the load has changed
    assert bench.server.num_held == 2

    bench.lookups.note_loaded("request", _KEYS[2:3], [])
    wait_until(lambda: not bench.server.num_held, "leases given back")


def test_leases_are_bounded_and_answers_are_not(bench: Bench) -> None:
    bench.server.put(_KEYS)

    assert bench.asked() == [True] * 4
    assert bench.server.num_held == 3


def test_without_a_word_on_how_much_may_be_leased_nothing_is_and_answers_are_the_same(bench: Bench) -> None:
    def silent() -> int:
        raise TierUnavailable("gone")

    bench.lookups.close()
    bench.lookups = PageLookups(bench.server, max_held=silent, patience_s=60.0)
    bench.server.put(_KEYS)

    assert bench.asked() == [True] * 4
    assert bench.server.num_held == 0


def test_a_lease_that_nobody_loads_from_is_given_back_in_time(bench: Bench) -> None:
    bench.lookups.close()
    bench.lookups = PageLookups(bench.server, max_held=lambda: 3, patience_s=60.0, held_s=0.01)
    bench.server.put(_KEYS)

    assert bench.asked() == [True] * 4
    wait_until(lambda: not bench.server.num_held, "leases given back")


def test_a_request_that_is_over_gives_its_leases_back(bench: Bench) -> None:
    bench.server.put(_KEYS)
    bench.asked()

    bench.lookups.forget("request")

    wait_until(lambda: not bench.server.num_held, "leases given back")


def test_a_page_that_could_not_be_loaded_is_a_miss_from_then_on(bench: Bench) -> None:
    bench.server.put(_KEYS)
    bench.asked()

    bench.lookups.note_loaded("request", _KEYS, _KEYS[2:])

    assert bench.answers() == [True, True, False, False]


def test_another_request_asks_for_itself(bench: Bench) -> None:
    assert bench.asked("first") == [False] * 4
    bench.server.put(_KEYS)

    assert bench.asked("second") == [True] * 4


def test_a_server_that_does_not_answer_in_time_is_a_miss(bench: Bench) -> None:
    bench.server.is_open.clear()
    bench.answers()
    bench.lookups.send()
    assert bench.answers() == [None] * 4

    bench.now = 3.0

    assert bench.answers() == [False] * 4


def test_what_nobody_waits_for_any_more_is_not_asked(bench: Bench) -> None:
    bench.server.is_open.clear()
    bench.answers("first")
    bench.lookups.send()
    wait_until(lambda: bench.server.num_waiting, "the first question to be asked")
    bench.answers("second")
    bench.lookups.send()
    bench.now = 3.0
    bench.server.is_open.set()
    bench.asked("third", _KEYS[:1])

    assert bench.server.num_looks == 2, "the first question, which had begun, and the third"


@pytest.mark.parametrize("flag", [LISTED_DOWN, None])
def test_a_server_that_is_gone_is_a_miss(bench: Bench, flag: int | None) -> None:
    if flag is None:
        bench.server.is_gone = True
    else:
        bench.server.put(_KEYS, flag)

    assert bench.asked() == [False] * 4
