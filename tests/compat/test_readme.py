"""README's deployment can be planned; the commands of docs/api.md get answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.deploy.plan.deployment import load_plan
from tests.compat.conftest import Serving
from tests.support.document_code import ROOT, Code, code_about, code_in
from tests.support.waiting import LIMIT_S

COMMANDS = code_in("docs/api.md", "sh")


def test_the_deployment_is_planned_with_a_cache_and_both_apis(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yml"
    file.write_text(code_about("README.md", "# deploy.yml").text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    plan = load_plan(file, tmp_path)

    (engine,), (cache,) = plan.engines, plan.caches
    assert engine.served_as == "village"
    assert engine.engine.cache_server == str(cache.server.unix)
    assert [(one.api, one.port) for one in plan.http.listeners] == [("openai", 8080), ("ollama", 11434)]


@pytest.mark.slow
@pytest.mark.parametrize("code", COMMANDS, ids=lambda code: code.place)
def test_the_commands_get_an_answer(serving: Serving, code: Code) -> None:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("the document's commands need bash and curl")
    command = code.text.replace("http://localhost:8080", serving.openai_url).replace("MODEL", serving.model)
    done = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl --silent --noproxy '*' ")],
        capture_output=True,
        timeout=LIMIT_S,
        check=True,
    )

    answer = json.loads(done.stdout)
    assert answer["model"] == serving.model
    assert answer["id"]
