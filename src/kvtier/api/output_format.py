"""Reads the required format of an answer: OpenAI's `response_format`, Ollama's `format`, and vLLM's fields.

Only structure and size are checked here: the engine checks whether it supports the schema or grammar.
"""

from __future__ import annotations

import json
from typing import Literal

from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.limits import (
    MAX_OUTPUT_CHOICES,
    MAX_RECORD_CHARACTERS,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_VALUES,
)
from kvtier.engine.grammar import JSON_OBJECT, MAX_GRAMMAR_CHARACTERS, Grammar, lark_text

_RESPONSE_FORMAT = "response_format"
_OUTPUTS = "structured_outputs"
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_TYPES = "text, json_object or json_schema"


def read_output_format(body: JsonBody) -> Grammar | None:
    """Read the fields of a chat or a completion; None for free text. Raises `HttpError` if several are given."""
    given = [name for name in (_RESPONSE_FORMAT, _OUTPUTS, *_GUIDED) if body.has(name)]
    found = [(name, grammar) for name in given if (grammar := _read(body, name)) is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise HttpError(400, f"{names} cannot be combined: give one of them", "invalid_value", found[1][0])
    return found[0][1] if found else None


def output_field(body: JsonBody) -> str:
    """The field that the answer's grammar comes from: one of those above, or else `tools`."""
    given = [name for name in (_RESPONSE_FORMAT, _OUTPUTS, *_GUIDED) if body.has(name)]
    form = body.value(_RESPONSE_FORMAT)
    if isinstance(form, dict) and form.get("type") == "text":
        given.remove(_RESPONSE_FORMAT)
    return given[0] if given else "tools"


def read_response_format(body: JsonBody) -> Grammar | None:
    """Read an object with a `type`: `text`, `json_object`, or `json_schema` with an object of that name inside."""
    kind = body.needed_text("type")
    grammar = None
    if kind == "json_object":
        grammar = JSON_OBJECT
    elif kind == "json_schema":
        inner = body.inner("json_schema")
        if inner is None:
            raise body.missing("json_schema")
        grammar = read_named_schema(inner)
        inner.refuse_rest()
    elif kind != "text":
        raise body.wrong("type", _TYPES)
    body.refuse_rest()
    return grammar


def read_named_schema(body: JsonBody) -> Grammar:
    """Read an object with `schema`, and with `name`, `description` and `strict`, which change nothing."""
    body.short_text("name", MAX_RECORD_CHARACTERS)
    body.text("description")
    body.flag("strict")
    if not body.has("schema"):
        raise body.missing("schema")
    return read_schema(body, "schema")


def read_ollama_format(body: JsonBody) -> Grammar | None:
    """Read Ollama's `format`: "json", a schema, or nothing."""
    given = body.value("format")
    if not given:
        return None
    if given == "json":
        return JSON_OBJECT
    if not isinstance(given, dict):
        raise body.wrong("format", '"json" or a JSON schema')
    return read_schema(body, "format")


def read_schema(body: JsonBody, name: str) -> Grammar:
    """Read a JSON schema. Its properties keep the client's order, in which the answer has them."""
    schema = body.value(name)
    if not isinstance(schema, dict):
        raise body.wrong(name, "a JSON schema, which is an object")
    if not _is_bounded(schema):
        raise body.wrong(name, f"a JSON schema of at most {MAX_SCHEMA_DEPTH} levels and {MAX_SCHEMA_VALUES} values")
    return _grammar(body, name, "json_schema", json.dumps(schema))


# --- vLLM's fields ----------------------------------------------------------------------------------------------------


def _read(body: JsonBody, name: str) -> Grammar | None:
    if name in _GUIDED:
        return _read_guided(body, name, _GUIDED[name])
    inner = body.inner(name)
    assert inner is not None, "the field is present"
    if name == _RESPONSE_FORMAT:
        return read_response_format(inner)
    given = [kind for kind in _GUIDED.values() if inner.has(kind)]
    if inner.flag("json_object"):
        given.append("json_object")
    inner.refuse_rest()
    if len(given) > 1:
        raise HttpError(400, f"{name} must have one of {' and '.join(given)}", "invalid_value", name)
    return _read_guided(inner, given[0], given[0]) if given else None


def _read_guided(body: JsonBody, name: str, kind: str) -> Grammar:
    if kind == "json_object":
        return JSON_OBJECT
    if kind == "choice":
        return _read_choice(body, name)
    if kind == "json":
        return _read_json(body, name)
    text = body.text(name)
    if not text:
        raise body.wrong(name, "text that is not empty")
    return _grammar(body, name, "regex" if kind == "regex" else "lark", text)


def _read_json(body: JsonBody, name: str) -> Grammar:
    """Read a schema, or a schema as text."""
    given = body.value(name)
    if not isinstance(given, str):
        return read_schema(body, name)
    if len(given) > MAX_GRAMMAR_CHARACTERS:
        raise body.wrong(name, f"a JSON schema of at most {MAX_GRAMMAR_CHARACTERS} characters")
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError):
        raise body.wrong(name, "a JSON schema, or its text") from None
    return read_schema(JsonBody({name: schema}), name)


def _read_choice(body: JsonBody, name: str) -> Grammar:
    given = body.items(name, MAX_OUTPUT_CHOICES) or []
    choices = [one for one in given if isinstance(one, str) and one]
    if not choices or len(choices) < len(given):
        raise body.wrong(name, "a list of texts, none of them empty")
    return _grammar(body, name, "lark", f"start: {' | '.join(map(lark_text, choices))}")


# --- bounds -----------------------------------------------------------------------------------------------------------


def _grammar(body: JsonBody, name: str, kind: Literal["json_schema", "regex", "lark"], text: str) -> Grammar:
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise body.too_long(name, MAX_GRAMMAR_CHARACTERS, len(text))
    return Grammar(kind, text)


def _is_bounded(schema: object) -> bool:
    left: list[tuple[object, int]] = [(schema, 1)]
    num_values = 0
    while left:
        value, depth = left.pop()
        num_values += 1
        if isinstance(value, (dict, list)):
            if depth > MAX_SCHEMA_DEPTH or num_values + len(left) + len(value) > MAX_SCHEMA_VALUES:
                return False
            left += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
    return True
