"""The README's deployment can be planned, and its program for the OpenAI client runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.deploy.plan.deployment import load_plan
from tests.compat.conftest import Serving

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_deployment_is_planned_with_a_cache_and_both_apis(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "deploy.yml"
    file.write_text(text.replace("memory: 20GiB", "memory: 1GiB").replace("/var/cache/kvtier", str(tmp_path / "cache")))

    plan = load_plan(file, tmp_path)

    (engine,), (cache,) = plan.engines, plan.caches
    assert engine.served_as == "qwen"
    assert engine.engine.cache_server == str(cache.server.unix)
    assert [(one.api, one.port) for one in plan.http.listeners] == [("openai", 8080), ("ollama", 11434)]


def test_the_program_for_the_openai_client_prints_an_answer(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    program = next(one for one in programs if "OpenAI" in one)
    here = program.replace("http://127.0.0.1:8080", serving.openai_url).replace('"qwen"', f'"{serving.model}"')
    values: dict[str, object] = {}
    capsys.readouterr()
    exec(compile(here, "README.md", "exec"), values)
    client = values["client"]
    client.close()  # type: ignore[attr-defined]

    assert capsys.readouterr().out
