"""What differs between the releases of vLLM that the connector works with.

| needed | since | before that |
|---|---|---|
| `CacheHitSource` | 0.32 | nobody asks where hits come from |
| the pages of a request (`kv_connector_block_state`) | 0.32 | windows, states and several groups are not cached |
| where pages of several layers lie (`KVCacheTensor.layer_stride`) | 0.32 | nothing opaque is cached |
| saves in steps that compute nothing | 0.31 | `wait_for_save` is not called in such steps |
| `KVConnectorTransferResults` | 0.30 | `get_finished` returns the two sets |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import vllm
from vllm.v1.core.sched.output import SchedulerOutput

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

HANDS_OVER_STATES = "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
"""vLLM says which pages a request has in each group, and which of them has a state that is complete."""

__all__ = [
    "HANDS_OVER_STATES",
    "SAVES_IN_IDLE_STEPS",
    "CacheHitSource",
    "KVConnectorTransferResults",
]
