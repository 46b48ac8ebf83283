"""Programs that nobody here wrote, against a deployment. They have an environment of their own (`make
test-clients-http`), without which these tests are not collected; the deployment runs with the project's Python.

Nothing leaves this machine: clients that would load something, or tell their makers something, are told not to.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.guardian import guard_this_process
from tests.support.left_processes import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 - hooks

_HAS_CLIENTS = importlib.util.find_spec("litellm") is not None
collect_ignore_glob = [] if _HAS_CLIENTS else ["test_*.py"]

_ROOT = Path(__file__).parents[3]
_PYTHON = "KVTIER_PYTHON"
_STOP_S = 120.0
_SETTINGS = {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "NO_PROXY": "127.0.0.1,localhost",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")

if _HAS_CLIENTS:  # before one of them is imported
    os.environ.update(_SETTINGS)
    for _name in _PROXIES:
        os.environ.pop(_name, None)
        os.environ.pop(_name.lower(), None)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where the APIs are. `openai_url` is without its `/v1`; models are `folder`'s by name; any key will do."""

    openai_url: str
    ollama_url: str
    folder: str
    python: str
    """The project's, for what has to be computed with kvtier's libraries."""

    @property
    def v1(self) -> str:
        return f"{self.openai_url}/v1"


def pytest_configure() -> None:
    guard_this_process()


@pytest.fixture(scope="session")
def stand() -> Iterator[Stand]:
    python = os.environ.get(_PYTHON, str(_ROOT / ".venv/bin/python"))
    with tempfile.TemporaryDirectory(prefix="kvtier-clients-") as folder:
        process = subprocess.Popen(
            [python, "-m", "tests.compat.http.stand", folder],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the deployment did not start: what it said is above"
            yield Stand(**json.loads(line), python=python)
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(_STOP_S)


@pytest.fixture(params=["qwen", "llama", "mistral"])
def model(request: pytest.FixtureRequest) -> str:
    """Each family's way to write calls."""
    return str(request.param)
