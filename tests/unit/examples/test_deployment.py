"""`kvtier serve` in a process of its own, where it cannot start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from examples.use_remote_KV_cache.deployment import Deployment

NOBODY = "http://127.0.0.1:1"


def test_it_does_not_start_where_another_program_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"another program already answers at {url}"):
            Deployment(tmp_path / "deploy.yml", url=url).start()


def test_a_deployment_that_ends_is_told_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yml"
    with (tmp_path / "log").open("w") as log, pytest.raises(RuntimeError, match=f"serve {file} ended with status 1"):
        Deployment(file, url=NOBODY, log=log).start()


def test_one_that_is_never_ready_is_given_up_and_stopped(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yml"
    with (
        (tmp_path / "log").open("w") as log,
        pytest.raises(TimeoutError, match=f"{NOBODY} is not ready after 0 s: is that where {file} serves"),
        Deployment(file, url=NOBODY, log=log, ready_s=0),
    ):
        pass
