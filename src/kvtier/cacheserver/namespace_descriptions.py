"""What the namespaces of a server cover, as their clients say: for whoever asks in what two of them differ.

Under the catalog's lock. A client may say anything here: it is kept within bounds, shown, and used for nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import msgspec

from kvtier.blocks.namespace import Namespace
from kvtier.errors import TierRefused

_MAX_CHARS = 1 << 20
_MAX_DEPTH = 16


class NamespaceDescriptions:
    """JSON by namespace, at most `max_chars` of it; the namespace that was named longest ago goes first."""

    def __init__(self, max_chars: int = _MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._texts: OrderedDict[Namespace, str] = OrderedDict()
        self._num_chars = 0

    def keep(self, namespace: Namespace, text: str) -> None:
        """The first word on a namespace stands."""
        if namespace in self._texts:
            self._texts.move_to_end(namespace)
            return
        self._texts[namespace] = text
        self._num_chars += len(text)
        while self._num_chars > self._max_chars:
            self._num_chars -= len(self._texts.popitem(last=False)[1])

    def get(self, namespace: Namespace) -> dict[str, object] | None:
        text = self._texts.get(namespace)
        return None if text is None else read_fields(text)

    def forget_all_but(self, namespaces: Collection[Namespace]) -> None:
        for namespace in [known for known in self._texts if known not in namespaces]:
            self._num_chars -= len(self._texts.pop(namespace))


def read_fields(text: str) -> dict[str, object]:
    """Raises `TierRefused` unless it is a JSON object, in ASCII, of a depth that everybody can handle."""
    if not text.isascii():  # a bound on characters would be none on what they are written as
        raise TierRefused("the fields of a namespace must be JSON in ASCII")
    try:
        fields: dict[str, object] = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise TierRefused(f"the fields of a namespace must be a JSON object: {error}") from error
    level: list[object] = [fields]
    for _ in range(_MAX_DEPTH):
        level = [inner for value in level for inner in _values(value)]
        if not level:
            return fields
    raise TierRefused(f"the fields of a namespace must not be nested more than {_MAX_DEPTH} deep")


def _values(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
