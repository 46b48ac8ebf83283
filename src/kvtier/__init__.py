"""kvtier: a multi-tier KV cache for LLM inference. Computes every prompt prefix once and keeps it where there is room.

`connect` reaches cache servers; `LLM` runs a model. Importing this package imports neither: the first use of a name
does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvtier.errors import MissingExtra

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

_EXTRAS = {"LLM": "engine"}
"""Names that need more than the core, and the extra that provides it."""

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
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        is_ours = (error.name or "").partition(".")[0] == __name__
        if is_ours or name not in _EXTRAS:
            raise
        raise MissingExtra(f"kvtier.{name}", _EXTRAS[name], error.name) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
