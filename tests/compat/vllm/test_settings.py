"""Wrong settings are refused at the start, in one sentence that names what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.plugins.vllm import connector
from kvtier.plugins.vllm.settings import read_settings
from tests.compat.vllm.engines import engine, model_folder


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"server": 5}, "server"),
        ({"server": ""}, "server"),
        ({"server": "http://localhost"}, "http"),
        ({"server": "unix:/tmp/x", "sever": "unix:/tmp/x"}, "sever"),
        ({"server": "unix:/tmp/x", "prompt_events": "tcp://127.0.0.1:1"}, "prompt_events: it must be unix:/path"),
        ({"server": "unix:/tmp/x", "timeout_s": "soon"}, "timeout_s"),
        ({"server": "unix:/tmp/x", "timeout_s": 0}, "timeout_s"),
        ({"server": "unix:/tmp/x", "timeout_s": -1.0}, "timeout_s"),
        ({"server": "unix:/tmp/x", "store": "everything"}, "store"),
        ({"server": "unix:/tmp/x", "salt": 7}, "salt"),
        ({"server": "unix:/tmp/x", "match_timeout_s": 0}, "match_timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"match_timeout_s": float("inf")}, "match_timeout_s"),
        ({"always_load": "yes"}, "always_load"),
        ({"server": "unix:/tmp/x", "memory": "8GiB"}, "memory is for a server that vLLM starts"),
        ({"server": "unix:/tmp/x", "folder": "/tmp/x", "disk": "8GiB"}, "folder is for a server that vLLM starts"),
        ({"memory": "8GB"}, "memory"),
        ({"memory": 0}, "memory"),
        ({"memory": True}, "memory"),
        ({"memory": 0.5}, "memory"),
        ({"folder": "/tmp/x", "disk": "much"}, "disk"),
        ({"folder": "/tmp/x"}, "folder needs disk"),
        ({"disk": "8GiB"}, "disk needs folder"),
        ({"folder": "", "disk": "8GiB"}, "folder must name a folder"),
        ({"cluster": {}}, "valkey"),
        ({"cluster": {"valkey": ["tcp://10.0.0.1:6379"]}}, "write tls://10.0.0.1:6379"),
        ({"server": "unix:/tmp/x", "cluster": {"valkey": ["tls://a:1"]}}, "cluster is for a server that vLLM starts"),
        ({"server": "unix:/tmp/x", "page": "127.0.0.1:9401"}, "page is for a server that vLLM starts"),
        ({"page": "0.0.0.0:9401"}, "a page is shown on 127.0.0.1:PORT"),
        ({"page": "somewhere"}, "page"),
        ({"token_file": "secret"}, "token_file is for a server over TCP"),
        ({"memory": "1GiB", "ca_file": "ca.pem"}, "ca_file is for a server over TCP"),
    ],
)
def test_wrong_settings_are_refused_with_one_sentence(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(settings)

    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_may_be_left_out() -> None:
    server = read_settings({}).embedded_server()
    same = read_settings({"memory": 4 << 30, "always_load": True}).embedded_server()

    assert server is not None
    assert same is not None
    assert same.address == server.address, "4GiB is the default"


def test_budgets_make_a_server_of_its_own_for_each_folder(tmp_path: Path) -> None:
    budgets = [
        {"memory": "8GiB"},
        {"memory": "8GiB", "folder": f"{tmp_path}/a", "disk": "100GiB"},
        {"memory": "8GiB", "folder": f"{tmp_path}/b", "disk": "100GiB"},
        {"memory": "8GiB", "cluster": {"valkey": ["tls://a:6379"]}},
    ]
    servers = [read_settings(each).embedded_server() for each in budgets]

    assert len({server.address for server in servers if server is not None}) == 4


def test_a_server_that_is_named_is_not_started() -> None:
    assert read_settings({"server": "unix:/tmp/x"}).embedded_server() is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sever": "unix:/tmp/x"}, "server"),
        ({"server": "tcp://127.0.0.1:1", "token_file": "/no/such/file"}, "/no/such/file"),
        ({"server": "tcp://127.0.0.1:1", "ca_file": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_an_engine_with_wrong_settings_does_not_start(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught, engine(model_folder(), settings=settings):
        pass

    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The connector's log lines; through another logger, since the first engine sets up vLLM's anew."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(connector, "logger", logging.getLogger("connector under test"))
    return caplog


@pytest.mark.parametrize(("policy", "is_warned_of"), [("fail", True), ("recompute", False)])
def test_a_failure_policy_that_fails_requests_is_warned_of(
    tmp_path: Path, log: pytest.LogCaptureFixture, policy: str, is_warned_of: bool
) -> None:
    with engine(model_folder(), f"unix:{tmp_path}/nobody", failure_policy=policy):
        pass

    messages = [record.getMessage() for record in log.records]
    assert any("set kv_load_failure_policy" in message for message in messages) == is_warned_of
    assert any(f"unix:{tmp_path}/nobody" in message for message in messages), "where it caches is not told"
