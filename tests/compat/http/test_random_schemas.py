"""With any weights, answers over HTTP are valid JSON of randomly drawn schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.compat.http.conftest import Stand

_NUM_SCHEMAS = 30
_MAX_DEPTH = 3
_NAMES = ("name", "größe", "tags", "a b", "x-1", "$ref_", "is_on", "日本")


def _schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """One that every answer ends with: all that may grow has a bound."""
    plain = [_text, _whole, _number, _choice, _constant, _flag, _nothing]
    nested = [_object, _list, _any_of]
    return dice.choice(plain if depth >= _MAX_DEPTH else plain + 2 * nested)(dice, depth)


def _text(dice: random.Random, depth: int) -> dict[str, Any]:
    shortest = dice.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + dice.randint(0, 8)}


def _whole(dice: random.Random, depth: int) -> dict[str, Any]:
    least = dice.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + dice.randint(0, 500)}


def _number(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": dice.randint(-9, 0), "maximum": dice.randint(1, 9)}


def _choice(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": dice.sample(["red", "grün", 3, 2.5, None, True, 'a "quoted" word'], dice.randint(1, 4))}


def _constant(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"const": dice.choice(["only", 7, False, ["a", 1]])}


def _flag(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _nothing(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(_NAMES, dice.randint(0, 4))
    properties = {name: _schema(dice, depth + 1) for name in names}
    required = [name for name in names if dice.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(dice: random.Random, depth: int) -> dict[str, Any]:
    least = dice.randint(0, 2)
    return {"type": "array", "items": _schema(dice, depth + 1), "minItems": least, "maxItems": least + 2}


def _any_of(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(dice, depth + 1) for _ in range(dice.randint(1, 3))]}


@pytest.fixture(scope="module")
def client(stand: Stand) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stand.v1, api_key="none", max_retries=0) as one:
        yield one


@pytest.mark.parametrize("number", range(_NUM_SCHEMAS))
def test_an_answer_is_valid_json_of_its_schema(client: openai.OpenAI, number: int) -> None:
    dice = random.Random(number)
    schema = _object(dice, 0)
    models = ("qwen", "llama", "mistral")
    answer = client.chat.completions.create(
        model=models[number % len(models)],
        messages=[{"role": "user", "content": f"Answer number {number}."}],
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        seed=number,
    )

    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
