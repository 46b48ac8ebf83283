"""kvtier: a multi-tier KV cache for LLM inference. Computes every prompt prefix once and keeps it where there is room.

`connect` reaches cache servers; importing this imports no torch.
"""

from __future__ import annotations

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.client.connecting import connect

__version__ = "0.1.0"

__all__ = ["BlockHash", "KvLayout", "Namespace", "NamespaceFields", "block_hashes", "connect"]
