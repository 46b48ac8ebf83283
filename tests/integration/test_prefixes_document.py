"""docs/prefixes.md: its commands warm, name, pack and drop a prefix of a running deployment.

They run unchanged, except for the model's name and the port.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clone import lay_out
from tests.support.deployments import DeploymentProcess
from tests.support.document_code import code_about
from tests.support.serving import MODEL, TEXT, save_model
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slow  # a deployment

WARM = code_about("docs/prefixes.md", "kvtier warm ")
ASK = code_about("docs/prefixes.md", "curl ")
MANAGE = code_about("docs/prefixes.md", "kvtier prefix ls")
PACK = code_about("docs/prefixes.md", "kvtier pack export")
COMMANDS = [WARM, ASK, MANAGE, PACK]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[DeploymentProcess]:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("the document's commands need bash and curl")
    lay_out(tmp_path)
    save_model(tmp_path / MODEL)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/handbook.md").write_text("Everyone has thirty days off in a year. " * 20)
    (tmp_path / "prompt.txt").write_text("Answer in one sentence.")
    (tmp_path / "key").write_text("a key of enough bytes")
    with DeploymentProcess(tmp_path, TEXT) as running:
        yield running


def _run(deployment: DeploymentProcess, commands: str) -> str:
    here = commands.replace("http://localhost:8080", deployment.openai_url).replace('"MODEL"', f'"{MODEL}"')
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here.replace("curl ", "curl --silent --fail --noproxy '*' ")],
        cwd=deployment.folder,
        env={
            **deployment.user_environment,
            "PATH": f"{deployment.folder / '.venv/bin'}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_warm_ask_for_pack_and_drop_a_prefix(deployment: DeploymentProcess) -> None:
    warmed = _run(deployment, WARM.text)
    assert "handbook:" in warmed

    usage = json.loads(_run(deployment, ASK.text))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]

    packed = _run(deployment, PACK.text)
    assert "signed     yes" in packed

    managed = _run(deployment, MANAGE.text)
    assert "handbook-2026" in managed
    assert "handbook" not in _run(deployment, "kvtier prefix ls"), "it is dropped"
