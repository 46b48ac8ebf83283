"""Random schemas: whatever the weights say, an answer that ends is JSON of its schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kvtier import LLM, SamplingParams
from kvtier.engine.constraint.formats import KNOWN_FORMATS
from kvtier.engine.grammar import Grammar
from kvtier.errors import InvalidParameter
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.drawn_schemas import drawn_schemas
from tests.support.examples import examples

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

_NAMES = ("id", "name", "Größe", "a b", "x-y", "$", 'q"uote', "items", "_")
_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
_PATTERNS = (r"^[a-c]{1,4}$", r"^\d{2}-\d{2}$", r"^(yes|no)$", r"^[A-Z][a-z]{0,3}$", r"^\w{2}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


@st.composite
def _numbers(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(-1000, 1000))
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    if draw(st.booleans()):
        schema |= {"minimum": low, "maximum": low + draw(st.integers(0, 500))}
    elif schema["type"] == "integer" and draw(st.booleans()):
        schema["multipleOf"] = draw(st.integers(1, 20))
    return schema


@st.composite
def _strings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return {"type": "string", "pattern": draw(st.sampled_from(_PATTERNS))}
    if kind == 1:
        return {"type": "string", "format": draw(st.sampled_from(_FORMATS))}
    low = draw(st.integers(0, 3))
    return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 4))}


_VALUES = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), _TEXTS, st.lists(st.integers(0, 9), max_size=2))
_LEAVES = st.one_of(
    _numbers(),
    _strings(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda value: {"const": value}, _VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=4)),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(_NAMES), max_size=4, unique=True))
    return {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
    }


@st.composite
def _lists(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    low = draw(st.integers(0, 2))
    schema: dict[str, Any] = {"type": "array", "items": draw(inner), "maxItems": low + draw(st.integers(0, 2))}
    if low:
        schema["minItems"] = low
    if draw(st.booleans()):
        schema["prefixItems"] = [draw(inner)]
    return schema


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner), _lists(inner), st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen2", num_layers=1, max_position_embeddings=2048)
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_space=8 << 20, max_num_requests=64) as opened:
        yield opened


def random_schemas(
    count: int, strategy: st.SearchStrategy[dict[str, Any]] = SCHEMAS, number: int = 28
) -> list[dict[str, Any]]:
    """The same ones every time."""
    found: list[dict[str, Any]] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schema=strategy)
    def collect(schema: dict[str, Any]) -> None:
        found.append(schema)

    collect()
    return found


@pytest.mark.scaled
def test_answers_are_json_of_random_schemas(llm: LLM) -> None:
    """Half of them greedily, half drawn at a high temperature."""
    schemas = random_schemas(examples(1000))
    params = [
        SamplingParams(
            max_tokens=250,
            temperature=0.0 if number % 2 else 1.3,
            seed=number,
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        for number, schema in enumerate(schemas)
    ]

    outputs = llm.generate([[number % 250, 3] for number in range(len(schemas))], params, progress=False)

    num_ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.error is None, (schema, output.error)
        [answer] = output.outputs
        assert answer.finish_reason in ("stop", "length"), (schema, answer)
        if answer.finish_reason == "stop":
            num_ended += 1
            jsonschema.validate(json.loads(answer.text), schema)
    assert num_ended > 0.9 * len(schemas)


_CHECKER = jsonschema.FormatChecker(KNOWN_FORMATS & set(jsonschema.FormatChecker.checkers))
_NUM_PARTS = 3
_DRAWN_PER_PART = 300
"""Of which more than a third are accepted."""


def refusal(llm: LLM, schema: dict[str, Any]) -> str:
    """Why a schema is refused; empty if it is not."""
    try:
        llm.engine.grammars.compile(Grammar("json_schema", json.dumps(schema)))
    except InvalidParameter as error:
        return str(error)
    return ""


@pytest.mark.scaled
@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_a_schema_of_any_keywords_is_followed_or_refused(llm: LLM, part: int) -> None:
    """Any valid schema: one that the library cannot follow is refused in one sentence, never followed in part."""
    schemas = random_schemas(examples(_DRAWN_PER_PART), drawn_schemas(), part)
    accepted = []
    for schema in schemas:
        sentence = refusal(llm, schema)
        assert "\n" not in sentence
        if not sentence:
            accepted.append(schema)
    params = [
        SamplingParams(max_tokens=60, temperature=1.3, seed=number, grammar=Grammar("json_schema", json.dumps(schema)))
        for number, schema in enumerate(accepted)
    ]

    outputs = llm.generate([[number % 250, 3] for number in range(len(accepted))], params, progress=False)

    assert len(accepted) >= len(schemas) // 4
    num_ended = 0
    for schema, output in zip(accepted, outputs, strict=True):
        assert output.error is None, (schema, output.error)
        [answer] = output.outputs
        assert answer.finish_reason in ("stop", "length"), (schema, answer)
        if answer.finish_reason == "stop":
            num_ended += 1
            jsonschema.Draft202012Validator(schema, format_checker=_CHECKER).validate(json.loads(answer.text))
    assert num_ended > len(accepted) // 2
