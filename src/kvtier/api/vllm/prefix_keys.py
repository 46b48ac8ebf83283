"""Keys of the beginnings of a prompt: prompts with a common beginning have their first keys in common.

A key is a digest of the first bytes of a request's prompt as the client sent it, and of the fields whose tokens come
before it, so prompts are compared without a tokenizer. Keys only serve to find the engine that has seen most of a
prompt.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from kvtier.api.limits import MAX_MESSAGES, MAX_PREFIX_KEYS
from kvtier.api.prompt_form import BILLING

PrefixKey = int

_FINE_BYTES = 256
_FINE_UP_TO = 16 << 10
_COARSE_BYTES = 4 << 10
"""A prompt has a key every 256 bytes in its first 16 KiB, and every 4 KiB after that."""

_KEY_BYTES = 8
_BEFORE = ("system", "instructions", "tools", "documents", "chat_template", "chat_template_kwargs", "lora_name")
"""Fields of a body that a chat template puts in front of the messages."""

_BILLING = re.compile(rb'(?<=")' + BILLING.encode() + rb'[^"\\]*(?:\\n)?')
"""A line of Claude Code's that vLLM, too, leaves out of the prompt: it changes with every request."""

_items = msgspec.json.Decoder(list[msgspec.Raw])


def prefix_keys(fields: Mapping[str, msgspec.Raw], salt: str) -> list[PrefixKey]:
    """Keys of a body's prompt, shortest beginning first. Prompts with different salts have no keys in common."""
    before = {name: bytes(fields.get(name, b"")) for name in ("model", *_BEFORE)}
    before["system"] = _BILLING.sub(b"", before["system"], count=1)
    head = b"\0".join([salt.encode(errors="replace"), *before.values()])
    for name in ("messages", "input", "prompt"):
        if name in fields:
            return _keys(head, _parts(name, bytes(fields[name])))
    return []


def num_keys_within(num_keys: int, share: float) -> int:
    """About how many of a prompt's keys are for beginnings within this share of it, rounded down."""
    num_fine = _FINE_UP_TO // _FINE_BYTES
    fine, coarse = min(num_keys, num_fine), max(0, num_keys - num_fine)
    if share >= 1:
        return num_keys
    num_bytes = int(share * (fine * _FINE_BYTES + coarse * _COARSE_BYTES))
    if num_bytes <= _FINE_UP_TO:
        return min(num_keys, num_bytes // _FINE_BYTES)
    return min(num_keys, num_fine + (num_bytes - _FINE_UP_TO) // _COARSE_BYTES)


def _parts(name: str, raw: bytes) -> Sequence[bytes]:
    """The prompt's messages one by one, since the next turn adds others after them; else the prompt without its end."""
    if name != "prompt" and raw[:1] == b"[":
        items = _items.decode(raw)
        if len(items) <= MAX_MESSAGES:
            return [bytes(item) for item in items]
    return [raw[:-1]]


def _keys(head: bytes, parts: Sequence[bytes]) -> list[PrefixKey]:
    digest = hashlib.sha256(head)
    keys: list[PrefixKey] = []
    position = 0
    for part in parts:
        start = 0
        while start < len(part) and len(keys) < MAX_PREFIX_KEYS:
            step = _FINE_BYTES if position + start < _FINE_UP_TO else _COARSE_BYTES
            piece = part[start : start + step]
            digest.update(piece)
            start += len(piece)
            if len(piece) == step or start == len(part):
                keys.append(int.from_bytes(digest.digest()[:_KEY_BYTES], "little"))
        position += len(part)
        digest.update(b"\0")
        if len(keys) >= MAX_PREFIX_KEYS:
            break
    return keys
