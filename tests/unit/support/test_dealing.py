"""Tests come to workers in parts of about one length, slow modules first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.dealing import dealt

_MODULES = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30)


def _tests(modules: list[tuple[bool, int]]) -> list[str]:
    return [
        f"{'slow' if is_slow else 'fast'}{number}::{position}"
        for number, (is_slow, count) in enumerate(modules)
        for position in range(count)
    ]


def _module(test: str) -> str:
    return test.partition("::")[0]


def _is_slow(test: str) -> bool:
    return test.startswith("slow")


@given(_MODULES, st.integers(1, 5))
def test_each_test_is_dealt_once_and_modules_stay_whole(modules: list[tuple[bool, int]], num_workers: int) -> None:
    tests = _tests(modules)
    order = dealt(tests, num_workers, _module, _is_slow)
    assert sorted(order) == sorted(tests)
    for module in {_module(test) for test in tests}:
        positions = [order.index(test) for test in tests if _module(test) == module]
        assert positions == list(range(positions[0], positions[0] + len(positions)))


def test_each_worker_begins_with_its_share_of_the_slow_ones() -> None:
    tests = _tests([(False, 4), (True, 4), (False, 4), (True, 4)])
    order = dealt(tests, 2, _module, _is_slow)
    first, second = order[:8], order[8:]
    assert [_is_slow(test) for test in first] == [_is_slow(test) for test in second] == [True] * 4 + [False] * 4


def test_one_worker_has_all_slow_ones_before_the_others() -> None:
    order = dealt(_tests([(False, 2), (True, 2)]), 1, _module, _is_slow)
    assert order == ["slow1::0", "slow1::1", "fast0::0", "fast0::1"]
