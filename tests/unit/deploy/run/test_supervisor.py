"""The supervisor over parts that only pretend: who starts, ends, and is started again, in which order, how patiently.

What it says is what it did: tests act when a line appears in its log, and look at the lines in the end.
"""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.api.config import ApiConfig
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.deploy.plan.parts import CachePart, DeploymentPlan, EnginePart, HttpPart, Listener
from kvtier.deploy.run.log import DeploymentLog
from kvtier.deploy.run.starts import FreeResources
from kvtier.deploy.run.supervisor import StopTimeouts, Supervisor
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.transport.address import UnixAddress

_SERVES = "ready; wait"
_FAKE = Path(__file__).with_name("fake_part.py")
_ROOM = FreeResources(num_cores=8, available_bytes=64 << 30)
_HURRY = StopTimeouts(engine_s=2.0, cache_s=2.0, cut_short_s=2.0)


Reaction = tuple[str, tuple[signal.Signals, ...]]
"""When this appears in the log, after what the reactions before it waited for: these signals to the supervisor."""


class _Log(io.StringIO):
    def __init__(self, reactions: Sequence[Reaction]) -> None:
        super().__init__()
        self._reactions = deque(reactions)

    def write(self, text: str) -> int:
        if self._reactions and re.search(self._reactions[0][0], text):
            for number in self._reactions.popleft()[1]:
                os.kill(os.getpid(), number)
        return super().write(text)


class _Deployment:
    """One cache, engines on places, one HTTP server. `scripts` says what each does, by name."""

    def __init__(
        self,
        tmp_path: Path,
        engines: dict[str, str] | None = None,
        *,
        room: FreeResources = _ROOM,
        kv_cache_space: int | None = None,
    ) -> None:
        self._room = room
        self._kv_cache_space = kv_cache_space
        self.runtime_folder = tmp_path / "run"
        self.runtime_folder.mkdir()
        self._scripts = tmp_path / "scripts"
        self._scripts.mkdir()
        self.log = ""
        self._engines = engines or {"engine": "cpu"}
        self.does("cache", _SERVES)
        self.does("http", _SERVES)
        for name in self._engines:
            self.does(name, _SERVES)

    def does(self, name: str, *scripts: str) -> None:
        """At its first start, its second, and so on; the last one holds for all later ones."""
        (self._scripts / name).write_text("\n".join(scripts))

    def run(self, *reactions: Reaction, patience: StopTimeouts | None = None) -> int:
        """Until it ends. Returns its status."""
        stream = _Log(reactions)
        supervisor = Supervisor(
            self.plan(),
            DeploymentLog(stream, ["kvtier", "cache", *self._engines, "http"]),
            self.runtime_folder,
            patience=patience or StopTimeouts(),
            command=(sys.executable, "-I", "-S", str(_FAKE), str(self._scripts)),
            room=lambda: self._room,
        )
        try:
            return supervisor.run()
        finally:
            self.log = stream.getvalue()

    def plan(self, *listeners: Listener) -> DeploymentPlan:
        unix = UnixAddress(str(self.runtime_folder / "cache.sock"))
        return DeploymentPlan(
            caches=(CachePart(name="cache", server=CacheServerConfig(memory_bytes=1 << 20, unix=unix)),),
            engines=tuple(
                EnginePart(name=name, served_as="model", engine=self._engine(place), socket="")
                for name, place in self._engines.items()
            ),
            http=HttpPart(name="http", api=ApiConfig(models=(), drain_s=0.0), listeners=listeners),
        )

    def _engine(self, place: str) -> EngineConfig:
        return EngineConfig(model="m", device=place, kv_cache_space=self._kv_cache_space)

    def events(self, *parts: str) -> list[str]:
        """What happened to these parts, as `part: event`, without process ids."""
        found = re.findall(r"^\S+ (\S+) +\| (.*)$", self.log, re.MULTILINE)
        return [f"{part}: {text.partition(', process')[0]}" for part, text in found if part in parts]


@pytest.fixture
def deployment(tmp_path: Path) -> _Deployment:
    return _Deployment(tmp_path)


_ALL_READY = "Ctrl-C stops it"
_STOP: Reaction = (_ALL_READY, (signal.SIGTERM,))


# --- starting and stopping --------------------------------------------------------------------------------------------


def test_the_cache_is_ready_before_the_others_start_and_they_end_in_the_other_order(deployment: _Deployment) -> None:
    assert deployment.run(_STOP) == 0

    events = deployment.events("cache", "engine", "http")
    assert events[:2] == ["cache: starting", "cache: ready"]
    assert events[2:4] == ["engine: starting", "http: starting"]
    assert events[-3:] == ["http: stopped", "engine: stopped", "cache: stopped"]
    assert deployment.log.count("ready after") == 1


def test_sigint_is_as_good_as_sigterm(deployment: _Deployment) -> None:
    assert deployment.run((_ALL_READY, (signal.SIGINT,))) == 0

    assert deployment.events("cache")[-1] == "cache: stopped"


def test_engines_of_one_device_start_one_after_the_other_and_of_two_at_once(tmp_path: Path) -> None:
    deployment = _Deployment(tmp_path, {"first": "cuda:0", "second": "cuda:0", "third": "cuda:1"})
    deployment.run(_STOP)

    of_one = [event for event in deployment.events("first", "second") if "st" in event or "ready" in event]
    assert of_one[:4] == ["first: starting", "first: ready", "second: starting", "second: ready"]
    assert deployment.events("first", "third")[:2] == ["first: starting", "third: starting"]


@pytest.mark.parametrize(
    ("places", "kv_cache_space"),
    [(("cpu", "cpu"), None), (("cuda:0", "cuda:0"), 1 << 30), (("cuda:0", "cpu"), None)],
    ids=["on the CPU", "with fixed sizes", "on a GPU and the CPU"],
)
def test_engines_that_measure_nothing_of_each_other_start_side_by_side(
    tmp_path: Path, places: tuple[str, str], kv_cache_space: int | None
) -> None:
    deployment = _Deployment(
        tmp_path, dict(zip(("first", "second"), places, strict=True)), kv_cache_space=kv_cache_space
    )
    deployment.does("first", "mark first; await second; ready; wait")
    deployment.does("second", "mark second; await first; ready; wait")

    assert deployment.run(_STOP) == 0

    assert deployment.events("first", "second")[:2] == ["first: starting", "second: starting"]


@pytest.mark.parametrize(
    "room", [FreeResources(1, 64 << 30), FreeResources(8, 3 << 29)], ids=["one core", "memory for one"]
)
def test_engines_start_in_turn_where_there_is_room_for_one(tmp_path: Path, room: FreeResources) -> None:
    deployment = _Deployment(tmp_path, {"first": "cpu", "second": "cpu", "third": "cpu"}, room=room)

    assert deployment.run(_STOP) == 0

    assert deployment.events("first", "second", "third")[:6] == [
        f"{name}: {event}" for name in ("first", "second", "third") for event in ("starting", "ready")
    ]


def test_sockets_of_killed_parts_go_with_the_runtime_folder(deployment: _Deployment) -> None:
    deployment.does("engine", "leave engine.sock; leave engine.sock.lock; ready; wait; kill")
    deployment.run(_STOP)

    assert not deployment.runtime_folder.exists()


def test_files_of_others_in_the_runtime_folder_stay(deployment: _Deployment) -> None:
    deployment.does("engine", "leave notes.txt; ready; wait")
    deployment.run(_STOP)

    assert [path.name for path in deployment.runtime_folder.iterdir()] == ["notes.txt"]


def test_what_a_part_says_is_in_the_log_with_its_name(deployment: _Deployment) -> None:
    deployment.does("engine", "say loading the weights; ready; wait; say writing the last blocks")
    deployment.run(_STOP)

    events = deployment.events("engine")
    assert events[1:3] == ["engine: loading the weights", "engine: ready"]
    assert events[-2:] == ["engine: writing the last blocks", "engine: stopped"]


def test_a_port_that_is_taken_is_said_before_anything_starts(deployment: _Deployment, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plan = deployment.plan(Listener("ollama", "127.0.0.1", 0), Listener("openai", *taken.getsockname()))
        with pytest.raises(ConfigError, match=r"cannot serve the openai API on 127.0.0.1:\d+: the port is in use"):
            Supervisor(plan, DeploymentLog(io.StringIO(), []), tmp_path)


# --- parts that fail --------------------------------------------------------------------------------------------------


def test_a_part_that_cannot_start_says_why_and_everything_stops_with_status_1(deployment: _Deployment) -> None:
    deployment.does("engine", 'report {"kind":"failed","sentence":"there is no model"}; exit 1')

    assert deployment.run() == 1

    assert "engine: cannot start: there is no model" in deployment.events("engine")
    assert deployment.events("cache")[-1] == "cache: stopped"
    assert "ready after" not in deployment.log


def test_a_part_that_dies_before_it_was_ready_stops_everything(deployment: _Deployment) -> None:
    deployment.does("cache", "exit 3")

    assert deployment.run() == 1

    assert deployment.events("cache", "engine", "http")[1:] == [
        "cache: cannot start: the process ended with status 3 before it was ready"
    ]


def test_a_part_that_died_is_started_again_later_each_time(deployment: _Deployment) -> None:
    deployment.does("http", "ready; kill", "kill", _SERVES)

    assert deployment.run(("again in 1 s", ()), (r"http +\| ready", (signal.SIGTERM,))) == 0

    ends = [event for event in deployment.events("http") if "again in" in event]
    assert ends == [f"http: the process was ended by SIGKILL; it is started again in {wait} s" for wait in ("0.5", "1")]
    assert deployment.events("engine")[:2] == ["engine: starting", "engine: ready"], "the others go on"


def test_a_part_that_failed_while_it_served_is_started_again_with_its_reason(deployment: _Deployment) -> None:
    failed = 'report {"kind":"failed","sentence":"the engine has stopped: out of memory"}'
    deployment.does("engine", f"ready; {failed}; exit 1", _SERVES)
    deployment.run(("out of memory; it is started again in 0.5 s", ()), (r"engine +\| ready", (signal.SIGTERM,)))

    assert deployment.events("engine")[-1] == "engine: stopped"


def test_half_a_report_of_a_killed_part_harms_neither_the_supervisor_nor_its_next_start(
    deployment: _Deployment,
) -> None:
    deployment.does("engine", "ready; report-half; kill", _SERVES)

    assert deployment.run(("again in 0.5 s", ()), (r"engine +\| ready", (signal.SIGTERM,))) == 0


def test_a_stop_while_a_part_is_down_does_not_wait_for_it(deployment: _Deployment) -> None:
    deployment.does("engine", "ready; kill")

    assert deployment.run(("it is started again in 0.5 s", (signal.SIGTERM,))) == 0

    assert deployment.events("engine").count("engine: starting") == 1


# --- impatience -------------------------------------------------------------------------------------------------------


def test_an_engine_that_loads_is_not_waited_for(deployment: _Deployment) -> None:
    deployment.does("engine", "say loading; hang")

    assert deployment.run(("loading", (signal.SIGINT,))) == 0

    assert deployment.events("engine")[-1] == "engine: was ended by SIGKILL"
    assert "ready after" not in deployment.log


def test_nothing_is_announced_as_ready_once_it_stops(deployment: _Deployment) -> None:
    deployment.does("engine", "ready; mark engine-is-ready; wait")
    deployment.does("http", "await engine-is-ready; say late; wait; ready")
    deployment.run(("late", (signal.SIGTERM,)))

    assert deployment.events("http")[-2:] == ["http: ready", "http: stopped"]
    assert "ready after" not in deployment.log


@pytest.mark.parametrize("name", ["cache", "engine", "http"])
def test_a_part_that_does_not_end_is_killed_when_its_time_is_over(deployment: _Deployment, name: str) -> None:
    deployment.does(name, "ready; hang")

    assert deployment.run(_STOP, patience=_HURRY) == 0

    assert deployment.events(name)[-1] == f"{name}: was ended by SIGKILL"
    assert [event for event in deployment.events("cache", "engine", "http") if "stopped" in event] == [
        f"{other}: stopped" for other in ("http", "engine", "cache") if other != name
    ]


def test_a_second_signal_leaves_little_time_to_every_part(deployment: _Deployment) -> None:
    for name in ("cache", "engine", "http"):
        deployment.does(name, "ready; hang")
    patience = StopTimeouts(engine_s=1000, cache_s=1000, cut_short_s=0.1)

    assert deployment.run(_STOP, ("once more cuts it short", (signal.SIGTERM,)), patience=patience) == 0

    assert deployment.log.count("was ended by SIGKILL") == 3


def test_a_third_signal_kills_at_once(deployment: _Deployment) -> None:
    for name in ("cache", "engine", "http"):
        deployment.does(name, "ready; hang")
    patience = StopTimeouts(engine_s=1000, cache_s=1000, cut_short_s=1000)

    assert deployment.run((_ALL_READY, (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)), patience=patience) == 0

    assert deployment.log.count("was ended by SIGKILL") == 3
    assert not deployment.runtime_folder.exists()


# --- starting engines again -------------------------------------------------------------------------------------------


def test_sighup_starts_engines_again_one_by_one_and_nothing_else(tmp_path: Path) -> None:
    deployment = _Deployment(tmp_path, {"first": "cpu", "second": "auto"})
    deployment.run((_ALL_READY, (signal.SIGHUP,)), ("first +\\| ready", ()), ("second +\\| ready", (signal.SIGTERM,)))

    again = deployment.log.partition("starting 2 engines again")[2]
    assert re.findall(r"(first|second|cache|http) +\| (starting|ready)", again) == [
        ("first", "starting"),
        ("first", "ready"),
        ("second", "starting"),
        ("second", "ready"),
    ]
    assert deployment.log.count("ready after") == 1


def test_an_engine_that_does_not_end_for_a_restart_is_killed(deployment: _Deployment) -> None:
    deployment.does("engine", "ready; hang", _SERVES)
    reactions = ((_ALL_READY, (signal.SIGHUP,)), ("engine +\\| ready", (signal.SIGTERM,)))

    assert deployment.run(*reactions, patience=_HURRY) == 0

    assert deployment.events("engine")[-3:] == ["engine: starting", "engine: ready", "engine: stopped"]


def test_an_engine_that_fails_in_a_restart_is_backed_off_and_the_others_get_their_turn(tmp_path: Path) -> None:
    deployment = _Deployment(tmp_path, {"first": "cpu", "second": "auto"})
    failed = 'report {"kind":"failed","sentence":"the weights are gone"}; exit 1'
    deployment.does("first", _SERVES, failed, _SERVES)
    deployment.run((_ALL_READY, (signal.SIGHUP,)), ("first +\\| ready", ()), ("second +\\| ready", (signal.SIGTERM,)))

    assert "first: the weights are gone; it is started again in 0.5 s" in deployment.events("first")
    assert deployment.events("second").count("second: ready") == 2


def test_sighup_while_it_stops_changes_nothing(deployment: _Deployment) -> None:
    assert deployment.run((_ALL_READY, (signal.SIGTERM, signal.SIGHUP))) == 0

    assert "again, one by one" not in deployment.log


def test_under_nohup_a_hangup_changes_nothing(tmp_path: Path) -> None:
    deployment = _Deployment(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        status = deployment.run(("Ctrl-C stops it", (signal.SIGHUP, signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGHUP, before)

    assert status == 0
    assert "one by one" not in deployment.log
