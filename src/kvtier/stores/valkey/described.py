"""Descriptions of the namespaces in a cluster, which explain why a prompt missed. Requests never read them.

`kvt1:{<namespace>}:fields` describes one namespace. `kvt1:{namespaces}` lists the namespaces in which hosts have stored
blocks, the latest first, so that they are found without a walk over all keys. A host writes both when it first stores a
block of a namespace, and renews them from time to time. Writing is best effort, and a key may hold anything: values
that cannot be read are left out. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvtier.blocks.namespace import NAMESPACE_BYTES, Namespace
from kvtier.blocks.namespace_document import read_fields
from kvtier.errors import TierRefused
from kvtier.observe.printable import printable
from kvtier.stores.valkey.cluster import Cluster, NodeShare
from kvtier.stores.valkey.node import NodeConnection
from kvtier.stores.valkey.resp import ReplyError, command
from kvtier.stores.valkey.slots import slot_of

MAX_LISTED = 128
_MAX_FIELDS_CHARS = 64 << 10
_MAX_VALUE_BYTES = 96 << 10
_MAX_READ_BYTES = 512 << 10
"""The limit for all descriptions that are read at once."""
_READ_KEYS = 8
_MAX_NAME_CHARS = 256
_MAX_BLOCK_TOKENS = 1 << 20
_MAX_DUE = 1024
_RENEWAL_S = 600.0
_RETRY_S = 10.0
_RENEWALS_PER_LIFE = 4
_LIST_TRIES = 3
_LONGEST_LIFE_MS = 11 * 366 * 86400 * 1000
_LIST_TAG = "namespaces"


@dataclass(frozen=True, slots=True)
class DescribedNamespace:
    """`fields` are what its digest covers (`NamespaceFields.document`)."""

    namespace: Namespace
    name: str
    block_tokens: int
    fields: Mapping[str, object]


class _Described(msgspec.Struct, frozen=True):
    """The value of a namespace's key, in JSON."""

    name: str
    block_tokens: int
    fields: msgspec.Raw


class _Listed(msgspec.Struct, frozen=True, array_like=True):
    """A namespace in the list, in hex, and when it leaves the list unless it is listed again."""

    namespace: str
    until_ms: int


class DescribedNamespaces:
    """The descriptions in one cluster, which its owner closes."""

    def __init__(self, cluster: Cluster, *, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._ttl_ms = int(ttl_s * 1000)
        self._renewal_s = min(_RENEWAL_S, ttl_s / _RENEWALS_PER_LIFE)
        self._clock = clock
        self._lock = threading.Lock()
        self._due_at: OrderedDict[Namespace, float] = OrderedDict()

    def is_due(self, namespace: Namespace) -> bool:
        """Whether this caller should describe the namespace now. For some seconds, no other caller is asked to."""
        now = self._clock()
        with self._lock:
            if now < self._due_at.get(namespace, now):
                return False
            self._due_at[namespace] = now + _RETRY_S
            self._due_at.move_to_end(namespace)
            if len(self._due_at) > _MAX_DUE:
                self._due_at.popitem(last=False)
            return True

    def describe(self, namespace: Namespace, name: str, block_tokens: int, fields: str, timeout_s: float) -> None:
        """Write a description, and wait for the cluster. `fields` are in JSON; too large ones are not written."""
        deadline = time.monotonic() + timeout_s
        if len(fields) > _MAX_FIELDS_CHARS:
            return
        described = _Described(printable(name, _MAX_NAME_CHARS), block_tokens, msgspec.Raw(fields.encode()))
        value = msgspec.json.encode(described)
        until_ms = int(self._clock() * 1000) + self._ttl_ms
        is_written = len(value) <= _MAX_VALUE_BYTES and self._set(_fields_key(namespace), value, until_ms, deadline)
        if is_written and self._list(namespace, until_ms, deadline):
            with self._lock:
                self._due_at[namespace] = self._clock() + self._renewal_s

    def known(self, timeout_s: float) -> list[DescribedNamespace]:
        """The described namespaces, the latest first. Some are left out if nodes do not answer in time."""
        deadline = time.monotonic() + timeout_s
        listed = list(self._listed(deadline))
        found: list[DescribedNamespace] = []
        num_left = _MAX_READ_BYTES
        for first in range(0, len(listed), _READ_KEYS):
            some = listed[first : first + _READ_KEYS]
            texts = self._get([_fields_key(namespace) for namespace in some], deadline)
            for namespace, text in zip(some, texts, strict=True):
                num_left -= len(text or b"")
                if num_left < 0:
                    return found
                if text is not None and (described := _read(namespace, text)) is not None:
                    found.append(described)
        return found

    # --- the list --------------------------------------------------------------------------------------------------

    def _list(self, namespace: Namespace, until_ms: int, deadline: float) -> bool:
        """Put the namespace first. Two hosts may overwrite each other's lists, so the list is read again."""
        for _ in range(_LIST_TRIES):
            listed = self._listed(deadline)
            others = {each: until for each, until in listed.items() if each != namespace}
            following = {namespace: until_ms, **dict(list(others.items())[: MAX_LISTED - 1])}
            value = msgspec.json.encode([_Listed(each.hex(), until) for each, until in following.items()])
            if not self._set(_key_in(_LIST_TAG), value, max(following.values()), deadline):
                return False
            if namespace in self._listed(deadline):
                return True
        return False

    def _listed(self, deadline: float) -> dict[Namespace, int]:
        (text,) = self._get([(_key_in(_LIST_TAG))], deadline)
        if text is None:
            return {}
        try:
            listed = msgspec.json.decode(text, type=list[_Listed])
            return {
                Namespace(digest): each.until_ms
                for each in listed[:MAX_LISTED]
                if self._is_alive(each) and len(digest := bytes.fromhex(each.namespace)) == NAMESPACE_BYTES
            }
        except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError):
            return {}

    def _is_alive(self, listed: _Listed) -> bool:
        now_ms = int(self._clock() * 1000)
        return now_ms < listed.until_ms <= now_ms + _LONGEST_LIFE_MS

    # --- keys ------------------------------------------------------------------------------------------------------

    def _get(self, keys: Sequence[_Key], deadline: float) -> list[bytes | None]:
        found: list[bytes | None] = [None] * len(keys)

        def act(node: NodeConnection, share: NodeShare) -> None:
            requests = [share.prefix + command(b"GET", keys[position].name) for position in share.positions]
            node.send([b"".join(requests)], deadline)
            for position in share.positions:
                reply = share.read(node, deadline, longest=_MAX_VALUE_BYTES)
                if isinstance(reply, ReplyError):
                    self._cluster.redirected(share, position, reply, node.address)
                elif isinstance(reply, bytes):
                    found[position] = reply

        self._cluster.spread([key.slot for key in keys], act, deadline, split_above=len(keys))
        return found

    def _set(self, key: _Key, value: bytes, until_ms: int, deadline: float) -> bool:
        is_set = False

        def act(node: NodeConnection, share: NodeShare) -> None:
            nonlocal is_set
            node.send([share.prefix, command(b"SET", key.name, value, b"PXAT", b"%d" % until_ms)], deadline)
            reply = share.read(node, deadline)
            if isinstance(reply, ReplyError):
                self._cluster.redirected(share, 0, reply, node.address)
            is_set = reply == b"OK"

        self._cluster.spread([key.slot], act, deadline, split_above=1)
        return is_set


@dataclass(frozen=True, slots=True)
class _Key:
    name: bytes
    slot: int


def _key_in(tag: str, suffix: str = "") -> _Key:
    """A key on the node that its `tag`, the part in braces, decides."""
    return _Key(f"kvt1:{{{tag}}}{suffix}".encode(), slot_of(tag.encode()))


def _fields_key(namespace: Namespace) -> _Key:
    return _key_in(namespace.hex(), ":fields")


def _read(namespace: Namespace, text: bytes) -> DescribedNamespace | None:
    """Decode a description; None for any value that no host would write."""
    try:
        described = msgspec.json.decode(text, type=_Described)
        fields = read_fields(bytes(described.fields).decode())
    except (msgspec.DecodeError, UnicodeError, RecursionError, TierRefused):
        return None
    if not 0 < described.block_tokens <= _MAX_BLOCK_TOKENS:
        return None
    return DescribedNamespace(namespace, printable(described.name, _MAX_NAME_CHARS), described.block_tokens, fields)
