"""Parts of a deployment that are killed while many ask: no wrong answer, errors that say so, and service comes back."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.deployments import DeploymentProcess
from tests.support.serving import (
    MODEL,
    TEXT,
    Traffic,
    Way,
    is_gone,
    right_answers,
    save_model,
    wait_until,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("kills")
    save_model(folder / MODEL)
    with DeploymentProcess(folder, TEXT) as deployment:
        yield deployment


@pytest.fixture
def deployment(shared: DeploymentProcess) -> DeploymentProcess:
    """Ready, whatever the test before did to it."""
    shared.wait_until_ready()
    return shared


@contextlib.contextmanager
def _traffic(deployment: DeploymentProcess) -> Iterator[Traffic]:
    answers = right_answers(deployment)
    with Traffic(deployment, answers) as traffic:
        yield traffic
    assert right_answers(deployment) == answers


def _kill(deployment: DeploymentProcess, name: str) -> int:
    part = deployment.part(name)
    part.send_signal(signal.SIGKILL)
    return part.pid


def test_a_killed_cache_server_fails_no_request_and_comes_back(deployment: DeploymentProcess) -> None:
    with _traffic(deployment) as traffic:
        dead = _kill(deployment, "cache")
        deployment.wait_for_part("cache", other_than=dead)
        deployment.wait_for_log(r"cache +\| the process was ended by SIGKILL; it is started again in 0.5 s")
        traffic.wait_for_right_answers(40)

    assert traffic.ways == {Way.RIGHT}, traffic.told()


def test_a_killed_http_server_cuts_connections_at_most_and_comes_back(deployment: DeploymentProcess) -> None:
    with _traffic(deployment) as traffic:
        dead = _kill(deployment, "http")
        deployment.wait_for_part("http", other_than=dead)
        deployment.wait_until_ready()
        traffic.wait_for_right_answers(20)

    assert traffic.ways <= {Way.RIGHT, Way.CUT, Way.REFUSED}, traffic.told()
    assert traffic.count(Way.CUT) <= 6, "those that were under way, and no others"


@pytest.mark.slow
def test_a_killed_engine_breaks_off_what_it_had_and_is_started_again_later_each_time(
    deployment: DeploymentProcess,
) -> None:
    start = len(deployment.log())
    with _traffic(deployment) as traffic:
        dead = _kill(deployment, MODEL)
        wait_until(lambda: traffic.count(Way.REFUSED), "requests are refused meanwhile")
        for _ in range(2):
            deployment.wait_for_part(MODEL, other_than=dead)
            dead = _kill(deployment, MODEL)
            wait_until(lambda pid=dead: is_gone(pid), "the engine is gone")
        deployment.wait_until_ready()
        traffic.wait_for_right_answers(20)

    assert traffic.ways <= {Way.RIGHT, Way.REFUSED, Way.BROKEN_OFF}, traffic.told()
    waits = re.findall(
        rf"{MODEL} +\| the process was ended by SIGKILL; it is started again in (\S+) s", deployment.log()[start:]
    )
    assert waits == ["0.5", "1", "2"]


def test_the_parts_of_a_killed_supervisor_end_by_themselves(deployment: DeploymentProcess) -> None:
    assert {part.kind for part in deployment.parts().values()} == {"cache", "engine", "http"}
    with Traffic(deployment, right_answers(deployment)) as traffic:
        deployment.kill()
        deployment.wait_until_nothing_is_left()

    assert Way.WRONG not in traffic.ways, traffic.told()
