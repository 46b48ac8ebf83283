"""docs/configuration.md is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.deploy.plan.deployment import read_deployment
from scripts import configuration_reference

EXAMPLES = re.findall(r"```yaml\n(.*?)```", configuration_reference.page(), re.DOTALL)


def test_the_page_is_what_the_script_writes() -> None:
    written = configuration_reference.PAGE.read_text(encoding="utf-8")

    assert written == configuration_reference.page(), "run python scripts/configuration_reference.py"


@pytest.mark.parametrize("example", EXAMPLES)
def test_its_examples_are_deployment_files(tmp_path: Path, example: str) -> None:
    path = tmp_path / "deploy.yml"
    path.write_text(example, encoding="utf-8")

    deployment, _ = read_deployment(path)

    assert deployment.models


def test_it_has_an_example_of_each_form() -> None:
    assert [text.partition(":")[0] for text in EXAMPLES] == ["models", "models", "chat"]


def test_each_row_of_its_tables_is_one_line() -> None:
    lines = configuration_reference.page().splitlines()
    rows = [line for line in lines if line.startswith("|")]

    assert rows
    assert [row for row in rows if not row.endswith("|")] == []
