"""How a run of the tests is made. The leak check comes from `kvtier.testing.leaks`.

`--cases` says which cases run. `make test` has a sample, `make test-all` the rest, and both together have all of them:

- `@pytest.mark.sampled` on a parametrized test: the sample has each value of each parameter at least once;
  `sampled(together=2)`: each pair of values; `sampled(every=n)`: the first case and every n-th after it.
- `@pytest.mark.slow`: not in the sample.
- Properties (Hypothesis) run both times: in the sample with few examples, which are the same every time, then with all
  (`tests/support/examples.py`). `@pytest.mark.scaled` says so of tests that hand `--cases` on to what they start.

Without `--cases` everything runs. `--share I/N` cuts a run into N that together are the whole.

A run ignores the signals that its parent ignores, as nohup asks; the processes that tests start do not. Processes that
are left at the end of a run fail it and are named; however it ends, they are killed (`tests/support/left_processes.py`,
`guardian.py`).
"""

from __future__ import annotations

import functools
import os
import signal
import ssl
from collections import defaultdict
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more, and workers share few cores

import certifi
import pytest
from hypothesis import is_hypothesis_test, settings

from tests.support.dealing import dealt
from tests.support.examples import SHORT_PROFILE, WHOLE_PROFILE
from tests.support.guardian import guard_this_process
from tests.support.left_processes import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 - hooks
from tests.support.sampling import covering, every_nth

_IGNORED_BY_PARENTS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", choices=("all", "sample", "rest"), default="all", help="which cases run")
    parser.addoption("--share", default="1/1", metavar="I/N", help="of those cases the I-th, and every N-th after it")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(SHORT_PROFILE if config.getoption("cases") == "sample" else WHOLE_PROFILE)
    for number in _IGNORED_BY_PARENTS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # unlike being ignored, this is not inherited
    guard_this_process()
    _read_certificates_once()


def _read_certificates_once() -> None:
    """Each client of httpx reads the certificates that browsers trust, for 66 ms, though tests ask this host alone."""
    make = ssl.create_default_context
    shared = functools.cache(lambda: make(cafile=certifi.where()))

    def create(*args: Any, **settings: Any) -> ssl.SSLContext:
        return shared() if not args and settings == {"cafile": certifi.where()} else make(*args, **settings)

    ssl.create_default_context = create  # type: ignore[assignment]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = _cases(config.getoption("cases"), items)
    first, step = map(int, config.getoption("share").split("/"))
    kept = kept[first - 1 :: step]
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    num_workers = getattr(config, "workerinput", {}).get("workercount")
    items[:] = kept if num_workers is None else dealt(kept, num_workers, _module, _starts_processes)


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _starts_processes(item: pytest.Item) -> bool:
    """Most tests but the unit tests do, and are slow."""
    return not item.nodeid.startswith("tests/unit/") or item.nodeid.startswith("tests/unit/kernels/")


def _cases(name: str, items: list[pytest.Item]) -> list[pytest.Item]:
    sample = _sample(items)
    match name:
        case "sample":
            return [item for item in items if item in sample]
        case "rest":
            return [item for item in items if item not in sample or _is_scaled(item)]
    return list(items)


def _is_scaled(item: pytest.Item) -> bool:
    return item.get_closest_marker("scaled") is not None or is_hypothesis_test(getattr(item, "obj", None))


def _sample(items: list[pytest.Item]) -> set[pytest.Item]:
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    return {item for of_one_test in tests.values() for item in _sample_of_one(of_one_test)}


def _sample_of_one(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of the cases of one test."""
    mark = items[0].get_closest_marker("sampled")
    if mark is None or not hasattr(items[0], "callspec"):
        return items
    cases = [{name: id(value) for name, value in item.callspec.params.items()} for item in items]
    every = mark.kwargs.get("every")
    chosen = every_nth(cases, every) if every else covering(cases, mark.kwargs.get("together", 1))
    return [items[position] for position in sorted(chosen)]
