"""What `kvtier explain` takes a model's namespace to be: what the engine makes of it, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvtier.blocks.namespace import NamespaceFields
from kvtier.cli.explain import ModelOptions, _table, _token_ids
from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.models.loading import load_model
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.explanation import Explanation, MatchEnd


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_model(made, "qwen2")
    return made


def options(folder: Path, **changes: Any) -> ModelOptions:
    settings = {
        "load_format": "auto",
        "dtype": "auto",
        "quantization": None,
        "device": "auto",
        "block_size": 16,
        "salt": "",
        "lora": "",
        "identity": "sampled",
    }
    return ModelOptions(folder=folder, **(settings | changes))


def loaded_fields(folder: Path, salt: str = "", block_size: int = 16, **settings: Any) -> NamespaceFields:
    """As the engine makes them."""
    loaded = load_model(folder, device="cpu", **settings)
    return loaded.namespace_fields(loaded.config.kv_layout(block_size, loaded.dtype), salt=salt)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "dtype": "bfloat16"},
        {"salt": "tenant", "block_size": 32},
        {"quantization": "fp8"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())) or "plain",
)
def test_a_folder_has_the_namespace_that_the_loaded_model_has(folder: Path, settings: dict[str, Any]) -> None:
    assert options(folder, device="cpu", **settings).fields().digest() == loaded_fields(folder, **settings).digest()


def test_text_becomes_the_tokens_that_the_engine_makes_of_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("the sky is", encoding="utf-8")
    expected = Tokenizer(folder).encode("the sky is")

    assert _token_ids(folder, "the sky is", None, None) == expected
    assert _token_ids(folder, None, tmp_path / "prompt", None) == expected
    assert _token_ids(folder, None, None, "1, 2,3") == [1, 2, 3]


def test_a_file_that_is_no_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match="not text in UTF-8"):
        _token_ids(folder, None, tmp_path / "prompt", None)


def test_a_device_that_does_not_exist_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cuda or cpu"):
        options(folder, load_format="dummy", device="abacus").fields()


def test_help_shows_both_ways_to_ask() -> None:
    help_text = CliRunner().invoke(main, ["explain", "--help"]).output

    assert "kvtier explain REQUEST_ID" in help_text
    assert "kvtier explain --model FOLDER --prompt" in help_text


def test_what_an_explanation_says_is_shown_and_not_obeyed() -> None:
    explanation = Explanation(
        request_id="\x1b[2J1",
        model="m\x07",
        namespace="ab",
        prompt_tokens=4,
        block_tokens=16,
        cached_tokens={"\x1b[31mhost": 2},
        ended_at_tokens=2,
        reason=MatchEnd.NEVER_STORED,
        tier="\u202ereversed",
        detail="one\r\ntwo",
    )
    shown = _table(explanation)
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "\\x1b[2J1" in shown
    assert "one\\r\\ntwo" in shown
