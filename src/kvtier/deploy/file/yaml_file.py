"""A YAML file as plain values, with the line of every key and value, so that every later error has its line.

Checks the file itself: syntax, duplicate keys, tags, endless aliases. The meaning of its values is up to the caller.
Anchors, aliases and merge keys work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

Location = tuple[str | int, ...]
"""The place of a value: the keys and positions that lead to it."""

_MAX_FILE_BYTES = 1 << 20
_MAX_NODES = 10_000
_MAX_ALIASES = 1_000
_MAX_DEPTH = 32
_MAX_VALUES = 20_000  # aliases of aliases could make any number of them from a few lines
_MAX_NUMBER_CHARACTERS = 1024
_MAX_SENTENCE_CHARACTERS = 2_000
_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
_MERGE, _TEXT, _TIMESTAMP, _BINARY = f"{_TAG}merge", f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}binary"


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The contents of the file at `path`: a mapping with text for keys."""

    path: Path
    value: dict[str, object]
    _lines: dict[Location, int] = field(default_factory=dict, repr=False)
    _key_lines: dict[Location, int] = field(default_factory=dict, repr=False)

    def has(self, location: Location) -> bool:
        return location in self._lines

    def at(self, location: Location) -> object:
        """The value there; `has` says whether there is one."""
        value: object = self.value
        for step in location:
            value = value[step]  # type: ignore[index]
        return value

    def line_of(self, location: Location) -> int:
        """The line of the value there, or of the nearest value that contains the place."""
        while location not in self._lines:
            location = location[:-1]
        return self._lines[location]

    def line_of_key(self, location: Location) -> int:
        return self._key_lines.get(location) or self.line_of(location)

    def sentence(self, line: int, text: str) -> str:
        return f"{self.path}:{line}: {printable(text, _MAX_SENTENCE_CHARACTERS)}"

    def error(self, location: Location, text: str) -> ConfigError:
        """An error `text` about the value at `location`."""
        return ConfigError(self.sentence(self.line_of(location), text))


def read_yaml(path: Path) -> YamlFile:
    """The file at `path`. Raises `ConfigError` with one sentence that begins with file and line."""
    text = _read_text(path)
    if not text.strip():
        raise ConfigError(f"{path}:1: the file is empty")
    loader: _Loader | None = None
    try:
        loader = _Loader(text, path)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            line = 1 if node is None else _line(node)
            raise ConfigError(f"{path}:{line}: the file must hold a mapping, with lines such as `models:`")
        builder = _Builder(path, loader)
        value = builder.mapping(node, ())
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: the character {chr(error.character)!r} is not allowed in YAML") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {printable(_problem(error))}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}:1: the file is nested too deeply") from error
    finally:
        if loader is not None:
            loader.dispose()
    return YamlFile(path, value, builder.lines, builder.key_lines)


def dotted(location: Location) -> str:
    """`models[0].swap_space`, as users name a value."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return text.removeprefix(".")


class _Loader(yaml.SafeLoader):
    """PyYAML's, with a limit on everything that could make a short file slow to read."""

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text)
        self._path = path
        self._depth = 0
        self._num_nodes = 0
        self._num_aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._num_nodes += 1
        self._num_aliases += self.check_event(yaml.AliasEvent)
        if self._num_nodes > _MAX_NODES:
            raise self._too_much(f"the file has more than {_MAX_NODES} values")
        if self._num_aliases > _MAX_ALIASES:
            raise self._too_much(f"the file has more than {_MAX_ALIASES} aliases")
        if self._depth > _MAX_DEPTH:
            raise self._too_much("the file is nested too deeply")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _too_much(self, text: str) -> ConfigError:
        return ConfigError(f"{self._path}:{self.peek_event().start_mark.line + 1}: {text}")  # type: ignore[no-untyped-call]


class _Builder:
    """Turns nodes into values, and fills `lines` and `key_lines`."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader
        self._open: set[int] = set()  # nodes that contain the current one
        self._num_values = 0
        self.lines: dict[Location, int] = {}
        self.key_lines: dict[Location, int] = {}

    def mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, object]:
        self.lines[location] = _line(node)
        self._check_tag(node, "map")
        self._enter(node)
        values: dict[str, object] = {}
        for name, (key, value) in self._entries(node).items():
            self.key_lines[*location, name] = _line(key)
            values[name] = self._value(value, (*location, name))
        self._open.remove(id(node))
        return values

    def _count(self, node: yaml.Node) -> None:
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise self._wrong(node, f"the file has more than {_MAX_VALUES} values once its aliases are filled in")

    def _value(self, node: yaml.Node, location: Location) -> object:
        self._count(node)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, location)
        self.lines[location] = _line(node)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq")
            self._enter(node)
            items = [self._value(item, (*location, number)) for number, item in enumerate(node.value)]
            self._open.remove(id(node))
            return items
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> object:
        if node.tag == _TIMESTAMP:
            return node.value  # a name may look like a date
        if node.tag == _BINARY:
            raise self._wrong(node, "the tag !!binary is not allowed here")
        if node.tag in _NUMBERS and ":" in node.value:
            shown = printable(node.value)
            raise self._wrong(node, f"{shown} is a number to the base of 60 in YAML: write '{shown}' if it is text")
        if node.tag in _NUMBERS and len(node.value) > _MAX_NUMBER_CHARACTERS:
            raise self._wrong(node, f"a number has at most {_MAX_NUMBER_CHARACTERS} characters")
        try:
            value: object = self._loader.construct_object(node)
        except (ValueError, LookupError) as error:
            raise self._wrong(node, f"{printable(repr(node.value))} does not match its tag") from error
        return value

    def _entries(self, node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The mapping's own entries and those it merges in, by key."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            self._count(key)
            if key.tag == _MERGE:
                for name, entry in self._merged(value).items():
                    merged.setdefault(name, entry)
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise self._wrong(key, "a key must be text, not a list or a mapping")
            if key.tag != _TEXT:
                shown = printable(key.value)
                raise self._wrong(key, f"a key must be text; for {shown} write '{shown}'")
            if key.value in own:
                first = _line(own[key.value][0])
                raise self._wrong(key, f"{printable(key.value)} is given twice, first in line {first}")
            own[key.value] = (key, value)
        return merged | own

    def _merged(self, node: yaml.Node) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for source in sources:
            self._count(source)
            if not isinstance(source, yaml.MappingNode):
                raise self._wrong(source, "<< takes a mapping, or a list of them")
            self._enter(source)
            entries = self._entries(source) | entries
            self._open.remove(id(source))
        return entries

    def _enter(self, node: yaml.Node) -> None:
        if id(node) in self._open:
            raise self._wrong(node, "an alias contains itself")
        self._open.add(id(node))

    def _check_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != f"{_TAG}{kind}":
            raise self._wrong(node, f"the tag {printable(node.tag.replace(_TAG, '!!'))} is not allowed here")

    def _wrong(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self._path}:{_line(node)}: {text}")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1MiB: is it a deployment file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: the file is not text in UTF-8") from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it cannot be read"
    if "'\\t'" in problem:
        return "a tab cannot indent, use spaces"
    return f"{problem} {error.context}" if error.context and problem.startswith("but found") else problem
