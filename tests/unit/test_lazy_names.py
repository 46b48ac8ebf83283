"""The names of `kvtier` itself, where the engine's packages are not installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kvtier
from kvtier.errors import KvtierError, MissingExtra
from tests.support.waiting import LIMIT_S

_PROGRAM = """
import json, sys
for name in ("torch", "transformers", "safetensors", "huggingface_hub", "numpy"):
    sys.modules[name] = None  # as if it were not installed
import kvtier
found = {}
for name in kvtier.__all__:
    try:
        exec(f"from kvtier import {name}")
    except ImportError as error:
        found[name] = [type(error).__name__, str(error), error.name]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def without_engine() -> dict[str, list[str]]:
    """What importing each name raises: its class, its sentence and the module it names."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_a_model_needs_an_extra_and_says_which(without_engine: dict[str, list[str]]) -> None:
    kind, sentence, module = without_engine["LLM"]

    assert kind == "MissingExtra"
    assert sentence == f"kvtier.LLM needs {module}, which is not installed: pip install 'kvtier[engine]'"
    assert module in ("torch", "transformers", "safetensors", "huggingface_hub", "numpy")


def test_everything_else_is_there_without_it(without_engine: dict[str, list[str]]) -> None:
    assert set(without_engine) == {"LLM"}
    assert len(kvtier.__all__) > 5


def test_it_is_an_import_error_and_one_of_ours() -> None:
    assert issubclass(MissingExtra, ImportError)
    assert issubclass(MissingExtra, KvtierError)


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        kvtier.nothing  # noqa: B018
