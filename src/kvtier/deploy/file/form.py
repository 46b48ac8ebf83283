"""From plain values to a Struct, with a sentence and a line for each error.

The Struct defines what is allowed. Unknown fields and values of a wrong type are collected over the whole file and
reported together; of errors that a Struct's own checks find, only the first is reported.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import inspect

from kvtier.deploy.file.size import SIZE_IN_WORDS, Size, read_size
from kvtier.deploy.file.yaml_file import Location, YamlFile, dotted
from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

_Form = TypeVar("_Form", bound=msgspec.Struct)

_BEFORE_PATH = " - at `$"
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_WORD = re.compile(r"[a-z][a-z_\-]*[a-z]")
_EXPONENT_FORM = re.compile(r"([+-]?\d+)(?:\.(\d*))?[eE]([+-]?)(\d+)")
_INFINITE = 1e300
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
_MAX_WHOLE = 1 << 63
_SECRETS = ("key",)
"""Fields whose values are not repeated in errors."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """`is_about_key`: the line is that of the key. `is_about_type`: the value as a whole has a wrong type."""

    location: Location
    text: str
    is_about_key: bool = False
    is_about_type: bool = False


def read_form(file: YamlFile, location: Location, kind: type[_Form]) -> _Form:
    """The value at `location` as a `kind`. Paths in it are relative to the file's folder.

    Raises `ConfigError` with a sentence for each unknown field and each invalid value, line by line.
    """
    value = file.at(location)
    problems = list(_problems(value, inspect.type_info(kind), location))
    if problems:
        lines = [
            (file.line_of_key(one.location) if one.is_about_key else file.line_of(one.location), one.text)
            for one in problems
        ]
        lines.sort(key=lambda line: line[0])
        raise ConfigError("\n".join(file.sentence(line, text) for line, text in lines))

    def read_custom(kind: type, value: object) -> object:
        if kind is Path:
            return _read_path(file, str(value))
        return read_size(value) if kind is Size else value

    try:
        return msgspec.convert(value, kind, dec_hook=read_custom, str_keys=True)
    except msgspec.ValidationError as error:
        raise _located(file, location, error) from error


def words_of(text: str) -> list[str]:
    """The words of a sentence, spelled like fields: one of them may be the field that it is about."""
    return [word.replace("-", "_") for word in _WORD.findall(text)]


def unknown(name: str, allowed: Iterable[str]) -> str:
    """The end of a sentence about a name that is not in `allowed`, such as a field."""
    names = list(allowed)
    near = difflib.get_close_matches(name.rpartition(".")[2], names, n=1)
    return f"{name} is unknown; {f'did you mean {near[0]}? ' if near else ''}allowed: {', '.join(names)}"


def is_short_path(text: str) -> bool:
    """Whether a file system can have it: names of at most 255 bytes, 4095 in all."""
    raw = os.fsencode(text.encode(errors="replace"))
    return len(raw) <= _MAX_PATH_BYTES and all(len(name) <= _MAX_NAME_BYTES for name in raw.split(b"/"))


def check_name(name: str, field: str = "name") -> None:
    """Raises `ConfigError` for an empty name, or one that logs and terminals cannot show."""
    if not name.strip():
        raise ConfigError(f"{field} must not be empty")
    if len(name) > _MAX_NAME_BYTES:
        raise ConfigError(f"{field} must have at most {_MAX_NAME_BYTES} characters, not {len(name)}")
    if printable(name, _MAX_NAME_BYTES) != name:
        raise ConfigError(f"{field} must have no control characters, as in {printable(name)}")


def absolute(path: Path) -> Path:
    """Absolute and without `..`; links are followed only if a `..` comes after them, so it means the same place."""
    parts = path.absolute().parts
    num_before = len(parts) - parts[::-1].index("..") if ".." in parts else 0
    return Path(os.path.realpath(Path(*parts[:num_before])) if num_before else "", *parts[num_before:])


def type_in_words(kind: inspect.Type) -> str:
    """The values that a field takes, for users."""
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(type_in_words(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}" if len(values) > 1 else str(values[0])
        case inspect.VarTupleType(item_type=item):
            return f"a list, each {type_in_words(item)}"
        case inspect.StructType() | inspect.DictType():
            return "a mapping"
        case inspect.CustomType(cls=cls) if cls is Size:
            return SIZE_IN_WORDS
        case inspect.CustomType(cls=cls) if cls is Path:
            return "a path"
    words = {
        inspect.IntType: "a whole number",
        inspect.FloatType: "a number",
        inspect.StrType: "text",
        inspect.BoolType: "true or false",
    }
    return words.get(type(kind), "any value")


def _problems(value: object, kind: inspect.Type, location: Location) -> Iterator[_Problem]:
    match kind:
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            yield from _problems_of_mapping(value, fields, location)
        case inspect.DictType(value_type=inner) if isinstance(value, dict):
            for name, one in value.items():
                yield from _problems(one, inner, (*location, name))
        case inspect.VarTupleType(item_type=inner) if isinstance(value, list):
            for number, one in enumerate(value):
                yield from _problems(one, inner, (*location, number))
        case inspect.UnionType(types=types):
            yield from _problems_of_union(value, types, location)
        case _ if not _fits(value, kind):
            yield _Problem(location, _wrong(value, kind, location), is_about_type=True)


def _problems_of_mapping(
    value: dict[str, object], fields: tuple[inspect.Field, ...], location: Location
) -> Iterator[_Problem]:
    known = {field.name: field for field in fields}
    for name, inner in value.items():
        here = (*location, name)
        if name in known:
            yield from _problems(inner, known[name].type, here)
        else:
            yield _Problem(here, unknown(dotted(here), known), is_about_key=True)
    for field in fields:
        if field.required and field.name not in value:
            yield _Problem(location, f"{dotted(location) or 'the file'} lacks {field.name}")


def _problems_of_union(value: object, kinds: tuple[inspect.Type, ...], location: Location) -> Iterator[_Problem]:
    tried = [list(_problems(value, kind, location)) for kind in kinds]
    if not all(tried):
        return
    # An error inside the value says more than that the value is wrong.
    inside = [problems for problems in tried if problems[0].location != location or not problems[0].is_about_type]
    if inside:
        yield from inside[0]
    else:
        yield _Problem(location, _wrong(value, inspect.UnionType(kinds), location), is_about_type=True)


def _fits(value: object, kind: inspect.Type) -> bool:
    match kind:
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_WHOLE
        case inspect.FloatType():
            return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _INFINITE
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.NoneType():
            return value is None
        case inspect.LiteralType(values=values):
            return isinstance(value, (str, int)) and value in values
        case inspect.CustomType(cls=cls) if cls is Path:
            return isinstance(value, str) and bool(value.strip()) and "\0" not in value and is_short_path(value)
        case inspect.CustomType(cls=cls) if cls is Size:
            try:
                read_size(value)
            except ConfigError:
                return False
            return True
    return isinstance(kind, (inspect.AnyType, inspect.CustomType))


def _wrong(value: object, kind: inspect.Type, location: Location) -> str:
    name, expected = dotted(location) or "the file", type_in_words(kind)
    if location and location[-1] in _SECRETS and value is not None:
        return f"{name} must be {expected}"
    if isinstance(value, str) and not is_short_path(value) and expected == "a path":
        return f"{name} must be a path of at most {_MAX_PATH_BYTES} bytes, {_MAX_NAME_BYTES} between two slashes"
    return f"{name} must be {expected}, not {_in_words(value)}{_hint(value, kind)}"


def _hint(value: object, kind: inspect.Type) -> str:
    """YAML 1.1 reads `1e18` as text."""
    found = _EXPONENT_FORM.fullmatch(value) if isinstance(value, str) else None
    if not found:
        return ""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if any(isinstance(one, inspect.FloatType) or getattr(one, "cls", None) is Size for one in kinds):
        whole, fraction, sign, exponent = found.groups()
        return f", which is text in YAML: write {whole}.{fraction or 0}e{sign or '+'}{exponent}"
    return ", which is text in YAML: write all digits" if any(isinstance(one, inspect.IntType) for one in kinds) else ""


def _in_words(value: object) -> str:
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return printable(repr(value))


def _read_path(file: YamlFile, text: str) -> Path:
    try:
        return absolute(file.path.parent / Path(text).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"{printable(text)} has no folder behind its ~") from error


def _located(file: YamlFile, location: Location, error: msgspec.ValidationError) -> ConfigError:
    """The error of a Struct's own check, at the field that it names."""
    text, found, path = str(error).rpartition(_BEFORE_PATH)
    if not found:
        text, path = str(error), ""
    steps = (int(index) if index else name for name, index in _STEP.findall(path))
    here = (*location, *steps)
    value = file.at(here) if file.has(here) else None
    names = [word for word in words_of(text) if isinstance(value, dict) and word in value]
    return file.error((*here, *names[:1]), text)
