"""What a schema says of a text that a call has without quotes, as part of a grammar in Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from kvtier.api.chat.schema_pattern import whole_text
from kvtier.api.chat.text_formats import TEXT_FORMATS
from kvtier.api.chat.tool import Tool, types_of
from kvtier.api.json_body import shown
from kvtier.api.neutral_fields import invalid
from kvtier.engine.grammar import lark_text

MAX_TEXT_LENGTH = {"minLength": 1024, "maxLength": 4096}
"""The largest values: the library has a state for each character, and builds those of `minLength` at once."""

_UNESCAPED_SLASH = re.compile(r"\\.|/", re.DOTALL)
_BRANCHES = ("anyOf", "oneOf")
_UNWRITTEN = ("allOf", "not", "if", "$ref", "$dynamicRef", *_BRANCHES)
_WORDS = {"null": '"null"', "boolean": '"true" | "false"'}


def lark_regex(pattern: str) -> str:
    """A regular expression as Lark's syntax quotes it."""
    escaped = _UNESCAPED_SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], pattern)
    return "/" + escaped.replace("\n", r"\n").replace("\r", r"\r") + "/"


def check_parameters(tool: Tool) -> None:
    """Raises `HttpError` for a tool whose parameters cannot be an object, as a call has them."""
    schema = tool.parameters or {}
    types = types_of(schema)
    if "object" not in types and (types or "type" in schema):
        given = shown(schema.get("type", types))
        raise invalid("tools", f"tools has parameters of {shown(tool.name)} that are {given}: they must be an object")


def choices_of(schema: object) -> list[str] | None:
    """The texts that a schema lists, if that is all that it says of them."""
    if not isinstance(schema, dict) or set(schema) & {*_UNWRITTEN, "pattern", "minLength", "maxLength", "format"}:
        return None
    values = [schema["const"]] if "const" in schema and "enum" not in schema else schema.get("enum")
    is_listed = isinstance(values, list) and values and all(isinstance(one, str) for one in values)
    return values if is_listed and not ("const" in schema and "enum" in schema) else None


class TextLimits:
    """Reads the schema of one parameter that may be a text. `end` is the mark after it, which it must not contain."""

    def __init__(self, tool: Tool, name: str, end: str) -> None:
        self._place = f"tools has a parameter {shown(name)} of {shown(tool.name)} that cannot be enforced"
        self._end = end

    def check_choices(self, choices: list[str]) -> None:
        if any(self._end in one for one in choices):
            raise self._refused(f"a value has {self._end} in it, which ends values in this model's calls")

    def terminal(self, schema: object) -> str:
        """The body of a terminal for the texts that the schema allows; empty for any text. Raises `HttpError`."""
        found = self._expression(schema)
        if not found:
            return ""
        return f"({found}) & ~{lark_regex(f'(?s:.*){re.escape(self._end)}(?s:.*)')}"

    def _expression(self, schema: object) -> str:
        assert isinstance(schema, dict), "it has a type"
        if "type" not in schema and any(key in schema for key in _BRANCHES):
            return self._branches(schema)
        types = types_of(schema)
        limits = self._limits(schema)
        unwritten = [key for key in _UNWRITTEN if key in schema]
        if unwritten:
            raise self._refused(f"{unwritten[0]} cannot stand beside the type of a text")
        if "enum" in schema or "const" in schema:
            limits.insert(0, self._listed(schema, types))
            return " & ".join(f"({one})" for one in limits)
        if not limits:
            return ""
        others = [one for one in types if one != "string"]
        return " | ".join([" & ".join(f"({one})" for one in limits), *map(self._word, others)])

    def _branches(self, schema: Mapping[str, object]) -> str:
        key = next(one for one in _BRANCHES if one in schema)
        branches = schema[key]
        assert isinstance(branches, list), "they have types"
        texts = [self._expression(one) for one in branches if "string" in types_of(one)]
        if self._limits(schema) or any(one in schema for one in (*_UNWRITTEN, "enum", "const") if one != key):
            raise self._refused(f"{key} cannot stand beside other limits of a text")
        if key == "oneOf" and len(texts) > 1:
            raise self._refused("its oneOf has several texts")
        if not all(texts):
            return ""
        others = [one for one in branches if "string" not in types_of(one)]
        if any(key in one for one in others for key in ("enum", "const", *_UNWRITTEN)):
            raise self._refused("a text with limits cannot be an alternative to another type with limits")
        kinds = [kind for one in others for kind in types_of(one)]
        return " | ".join([*(f"({one})" for one in texts), *map(self._word, kinds)])

    def _limits(self, schema: Mapping[str, object]) -> list[str]:
        found = []
        pattern, form = schema.get("pattern"), schema.get("format")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise self._refused("its pattern is not a text")
            try:
                found.append(lark_regex(whole_text(pattern)))
            except ValueError as error:
                raise self._refused(f"its pattern cannot be part of a grammar: {error}") from None
        if isinstance(form, str) and form in TEXT_FORMATS:
            found.append(lark_regex(TEXT_FORMATS[form]))
        least, most = self._length(schema, "minLength"), self._length(schema, "maxLength")
        if least is not None and most is not None and least > most:
            raise self._refused("its minLength is more than its maxLength")
        if least or most is not None:
            found.append(lark_regex(f"(?s:.){{{least or 0},{'' if most is None else most}}}"))
        return found

    def _length(self, schema: Mapping[str, object], key: str) -> int | None:
        given = schema.get(key)
        if given is None:
            return None
        most = MAX_TEXT_LENGTH[key]
        if isinstance(given, (int, float)) and type(given) is not bool and given in range(most + 1):
            return int(given)
        raise self._refused(f"its {key} must be a whole number of at most {most}")

    def _listed(self, schema: Mapping[str, object], types: list[str]) -> str:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list) or ("enum" in schema and "const" in schema):
            raise self._refused("it has an enum that is not a list, or a const, too")
        texts = [one for one in values if isinstance(one, str)]
        self.check_choices(texts)
        words = {"null": (None,), "boolean": (True, False)}
        kept = [one for kind in types for one in words.get(kind, ()) if any(one is value for value in values)]
        if len(texts) + len(kept) < len(values):
            raise self._refused("its values must be texts, true, false or null, of its types")
        found = [lark_text(one) for one in texts] + [lark_text(json.dumps(one)) for one in kept]
        return " | ".join(dict.fromkeys(found))

    def _word(self, kind: str) -> str:
        if kind not in _WORDS:
            raise self._refused(f"a text with limits cannot be an alternative to the type {shown(kind)}")
        return _WORDS[kind]

    def _refused(self, reason: str) -> Exception:
        return invalid("tools", f"{self._place}: {reason}")
