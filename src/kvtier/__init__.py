"""kvtier: a multi-tier KV cache for LLM inference. Computes every prompt prefix once and keeps it where there is room.

`connect` reaches cache servers; `LLM` runs a model. Importing this imports none of it: the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.blocks.hashing import BlockHash, block_hashes
    from kvtier.blocks.layout import KvLayout
    from kvtier.blocks.namespace import Namespace, NamespaceFields
    from kvtier.client.connecting import connect
    from kvtier.engine.llm import LLM
    from kvtier.engine.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "BlockHash",
    "KvLayout",
    "LLM",
    "Namespace",
    "NamespaceFields",
    "SamplingParams",
    "block_hashes",
    "connect",
]

_MODULES = {
    "BlockHash": "kvtier.blocks.hashing",
    "KvLayout": "kvtier.blocks.layout",
    "LLM": "kvtier.engine.llm",
    "Namespace": "kvtier.blocks.namespace",
    "NamespaceFields": "kvtier.blocks.namespace",
    "SamplingParams": "kvtier.engine.sampling_params",
    "block_hashes": "kvtier.blocks.hashing",
    "connect": "kvtier.client.connecting",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
