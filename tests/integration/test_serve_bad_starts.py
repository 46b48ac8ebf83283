"""Deployments that cannot start: one sentence that says why, a status, quickly, and nothing left behind."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from kvtier.testing.servers import cache_server
from tests.support.deployments import DeploymentProcess
from tests.support.serving import MODEL, TEXT, save_model


def _refused(deployment: DeploymentProcess) -> str:
    """Why it ended with status 1. Nothing is left of it then."""
    try:
        deployment.start()
        status = deployment.wait_until_ended()
        log = deployment.log()
        assert status == 1, log
        assert "Traceback" not in log
        assert deployment.process_ids() == set()
        assert list(deployment.runtime_parent.iterdir()) == []
        (sentence,) = re.findall(r"^(?:Error: |\S+ \S+ +\| cannot start: )(.*)$", log, re.MULTILINE)
        return str(sentence)
    finally:
        deployment.close()


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir()
    deployment = DeploymentProcess(tmp_path, TEXT)
    with socket.create_server(("127.0.0.1", deployment.ollama_port)):
        sentence = _refused(deployment)

    port = deployment.ollama_port
    assert sentence == f"cannot serve the ollama API on 127.0.0.1:{port}: the port is in use"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("models:\n  - model: ./nowhere\n", r"deploy.yml:2: there is no model folder './nowhere'"),
        ("models:\n  - model: tiny\n    kv_cash_space: 1GiB\n", r"deploy.yml:3: .*kv_cash_space.*kv_cache_space"),
        ("models:\n  - model: tiny\n    max_model_len: many\n", r"deploy.yml:3: .*max_model_len"),
        ("models: [\n", r"deploy.yml:\d+: "),
    ],
    ids=["no model", "unknown field", "wrong type", "no YAML"],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / MODEL).mkdir()

    assert re.search(wanted, _refused(DeploymentProcess(tmp_path, text)))


def test_a_model_whose_config_is_broken_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / MODEL)
    (tmp_path / MODEL / "config.json").write_text('{"architectures": [')

    sentence = _refused(DeploymentProcess(tmp_path, TEXT))

    assert str(tmp_path / MODEL / "config.json") in sentence


@pytest.mark.slow
def test_too_little_room_for_kv_is_said_with_what_is_needed(tmp_path: Path) -> None:
    save_model(tmp_path / MODEL)
    text = TEXT.replace("kv_cache_space: 32MiB", "kv_cache_space: 8KiB")

    assert _refused(DeploymentProcess(tmp_path, text)) == ("kv_cache_space leaves 8KiB for KV, but 2 blocks take 16KiB")


def test_a_file_where_the_cache_folder_should_be_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir()
    (tmp_path / "cache").write_text("a letter")

    sentence = _refused(DeploymentProcess(tmp_path, TEXT))

    assert str(tmp_path / "cache") in sentence
    assert (tmp_path / "cache").read_text() == "a letter"


def test_a_cache_folder_that_another_server_uses_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir()
    with cache_server("--folder", str(tmp_path / "cache"), "--disk", "64MiB"):
        sentence = _refused(DeploymentProcess(tmp_path, TEXT))

    assert str(tmp_path / "cache") in sentence
    assert "use" in sentence
