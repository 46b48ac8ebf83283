"""Deployment files on disk, in a folder that is also the current one: sentences then begin with `deploy.yml:`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.deploy.plan.deployment import load_plan
from kvtier.deploy.plan.parts import DeploymentPlan
from kvtier.errors import ConfigError

Deploy = Callable[[str], DeploymentPlan]
Refuse = Callable[[str], list[str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def deploy(here: Path) -> Deploy:
    """The plan of a file with this text."""

    def load(text: str) -> DeploymentPlan:
        Path("deploy.yml").write_text(textwrap.dedent(text), encoding="utf-8")
        return load_plan(Path("deploy.yml"), Path("/run/kvtier"))

    return load


@pytest.fixture
def refuse(deploy: Deploy) -> Refuse:
    """The sentences with which a file with this text is refused."""

    def load(text: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            deploy(text)
        return str(caught.value).splitlines()

    return load
