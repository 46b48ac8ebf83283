"""What a model's generation_config.json says of sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.models.generation_defaults import read_generation_defaults


def test_sampling_parameters_are_read_and_nothing_else(tmp_path: Path) -> None:
    document = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [1], "n": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(document))

    assert read_generation_defaults(tmp_path) == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize("text", ["", "[]", "{", '{"temperature": "hot", "top_p": null, "top_k": true}'])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)

    assert read_generation_defaults(tmp_path) == {}


def test_no_file_and_no_folder_say_nothing(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == read_generation_defaults(None) == {}
