"""Reads a JSON body field by field and checks each type; fields that are never read are refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from kvtier.api.http_error import HttpError

_Value = TypeVar("_Value")

_WHOLE_LOW, _WHOLE_HIGH = -(1 << 63), (1 << 64) - 1
_SHOWN_CHARACTERS = 60


def _finite(text: str) -> float:
    """Parse a number as Python does: the decoder's own parser takes a hundred times longer for some numbers."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is out of range")
    return number


_decode = msgspec.json.Decoder(float_hook=_finite).decode


def decode_body(body: bytes) -> JsonBody:
    """Raises `HttpError` if the body is not a JSON object."""
    try:
        document = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise HttpError(400, f"the body is not valid JSON: {error}", "invalid_json") from error
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply", "invalid_json") from error
    if not isinstance(document, dict):
        raise HttpError(400, "the body must be a JSON object", "invalid_json")
    return JsonBody(document)


def decode_inner(text: str) -> object:
    """Decode JSON inside a text of a body. Raises `ValueError` if it is invalid."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


class JsonBody:
    """A JSON object. A field that is null counts as absent. `path` is prepended to field names in errors."""

    def __init__(self, document: Mapping[str, object], path: str = "") -> None:
        self._document = document
        self._path = path
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return self.value(name) is not None

    def value(self, name: str) -> object:
        """The decoded value, unchecked."""
        self._read.add(name)
        return self._document.get(name)

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "text")

    def needed_text(self, name: str) -> str:
        found = self.text(name)
        if found is None:
            raise self.missing(name)
        return found

    def short_text(self, name: str, max_characters: int) -> str | None:
        found = self.text(name)
        if found is not None and len(found) > max_characters:
            raise self.too_long(name, max_characters, len(found))
        return found

    def flag(self, name: str) -> bool | None:
        return self._typed(name, bool, "true or false")

    def whole(self, name: str) -> int | None:
        found = self.value(name)
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
            raise self.wrong(name, "a whole number")
        if found is not None and not _WHOLE_LOW <= found <= _WHOLE_HIGH:  # messages to the engine cannot carry it
            raise self.wrong(name, "a whole number of at most 64 bits")
        return found

    def number(self, name: str) -> float | None:
        found = self.value(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self.wrong(name, "a number")
        try:
            return float(found)
        except OverflowError as error:
            raise self.wrong(name, "a smaller number") from error

    def items(self, name: str, max_items: int | None = None) -> list[object] | None:
        found = self._typed(name, list, "a list")
        if found is not None and max_items is not None and len(found) > max_items:
            path, count = self._path + name, len(found)
            raise HttpError(400, f"{path} must not be more than {max_items}, but is {count}", "invalid_value", path)
        return found

    def inner(self, name: str) -> JsonBody | None:
        found = self._typed(name, dict, "an object")
        return None if found is None else JsonBody(found, f"{self._path}{name}.")

    def wrong(self, name: str, expected: str) -> HttpError:
        sentence = f"{self._path}{name} must be {expected}, not {shown(self._document.get(name))}"
        return HttpError(400, sentence, "invalid_type", self._path + name)

    def too_long(self, name: str, max_characters: int, num_characters: int) -> HttpError:
        path = self._path + name
        sentence = f"{path} must have at most {max_characters} characters, not {num_characters}"
        return HttpError(400, sentence, "invalid_value", path)

    def missing(self, name: str) -> HttpError:
        return HttpError(400, f"{self._path}{name} is missing", "missing_field", self._path + name)

    def refuse(self, name: str, sentence: str) -> HttpError:
        """An `HttpError` about a field that is known, but not supported here."""
        return HttpError(400, f"{self._path}{name} {sentence}", "unsupported_parameter", self._path + name)

    def refuse_rest(self) -> None:
        """Raises `HttpError` for a field that was not read, so that no field is ignored silently."""
        for name, found in self._document.items():
            if name not in self._read and found is not None:
                short = _shortened(name)
                near = difflib.get_close_matches(short, self._read, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                path = self._path + short
                raise HttpError(400, f"{path} is not supported here{hint}", "unsupported_parameter", path)

    def _typed(self, name: str, kind: type[_Value], expected: str) -> _Value | None:
        found = self.value(name)
        if found is not None and not isinstance(found, kind):
            raise self.wrong(name, expected)
        return found


def shown(value: object) -> str:
    """A value of a body as error sentences quote it: JSON, shortened if it is long."""
    if isinstance(value, (list, dict)) and len(value) > _SHOWN_CHARACTERS:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, str):
        value = value[:_SHOWN_CHARACTERS]
    try:
        return _shortened(msgspec.json.encode(value).decode())
    except RecursionError:
        return "a deeply nested value"
    except OverflowError:
        return "a number that is too large"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
