"""What differs between the releases of vLLM that the connector works with.

| needed | since | before that |
|---|---|---|
| `CacheHitSource` | 0.32 | nobody asks where hits come from |
| saves in steps that compute nothing | 0.31 | `wait_for_save` is not called in such steps |
| `KVConnectorTransferResults` | 0.30 | `get_finished` returns the two sets |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import vllm

from kvtier.plugins.vllm.releases import release_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
else:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:

        class CacheHitSource(enum.Enum):
            HOST = enum.auto()
            DISK = enum.auto()

    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    except ImportError:

        @dataclass
        class KVConnectorTransferResults:
            finished_sending: set[str] = field(default_factory=set)
            finished_recving: set[str] = field(default_factory=set)
            failed_recving: set[str] = field(default_factory=set)


SAVES_IN_IDLE_STEPS = release_of(vllm.__version__) >= (0, 31)
"""vLLM asks for saves in steps that compute nothing, too."""

__all__ = ["CacheHitSource", "KVConnectorTransferResults", "SAVES_IN_IDLE_STEPS"]
