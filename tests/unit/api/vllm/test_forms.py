"""The model's name in a form, wherever it stands, and whatever else the form has."""

from __future__ import annotations

import pytest

from kvtier.api.vllm.bodies import model_in_form


def part_of(name: str, value: bytes, more: str = "") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


@pytest.mark.parametrize("size", [10, 3 << 20])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_model_stands_before_or_behind_the_file(size: int, is_first: bool) -> None:
    file = part_of("file", b"x" * size, '; filename="a.wav"\r\nContent-Type: audio/wav')
    model = part_of("model", b"whisper")

    assert model_in_form((model + file if is_first else file + model) + b"--b--\r\n") == "whisper"


def test_a_field_that_only_begins_so_is_another() -> None:
    assert model_in_form(part_of("model_kind", b"other") + part_of("model", b"whisper") + b"--b--\r\n") == "whisper"


@pytest.mark.parametrize("value", [b"", b"x" * 2000])
def test_a_name_that_is_empty_or_too_long_is_none(value: bytes) -> None:
    assert model_in_form(part_of("model", value) + b"--b--\r\n") is None


def test_of_a_form_that_repeats_the_field_without_end_only_a_few_are_looked_at() -> None:
    assert model_in_form(b'name="model"\r\n' * 70_000 + part_of("model", b"whisper")) is None
