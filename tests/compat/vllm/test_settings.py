"""Wrong settings are refused at the start, in one sentence that names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.plugins.vllm.settings import read_settings
from tests.compat.vllm.engines import engine, model_folder


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "server"),
        ({"server": 5}, "server"),
        ({"server": ""}, "server"),
        ({"server": "http://localhost"}, "http"),
        ({"server": "unix:/tmp/x", "sever": "unix:/tmp/x"}, "sever"),
        ({"server": "unix:/tmp/x", "timeout_s": "soon"}, "timeout_s"),
        ({"server": "unix:/tmp/x", "timeout_s": 0}, "timeout_s"),
        ({"server": "unix:/tmp/x", "timeout_s": -1.0}, "timeout_s"),
        ({"server": "unix:/tmp/x", "store": "everything"}, "store"),
        ({"server": "unix:/tmp/x", "salt": 7}, "salt"),
    ],
)
def test_wrong_settings_are_refused_with_one_sentence(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(settings)

    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_a_failure_policy_that_fails_requests_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(model_folder(), f"unix:{tmp_path}/nobody", failure_policy="fail"):
        pass

    assert [record for record in caplog.records if "kv_load_failure_policy" in record.getMessage()]
