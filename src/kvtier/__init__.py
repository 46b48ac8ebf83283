"""kvtier: a multi-tier KV cache for LLM inference. Computes every prompt prefix once and keeps it where there is room.

`connect` reaches cache servers; `LLM` runs a model. Importing this imports no torch: the first use of `LLM` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.client.connecting import connect
from kvtier.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvtier.engine.llm import LLM

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


def __getattr__(name: str) -> object:
    if name == "LLM":
        from kvtier.engine.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
