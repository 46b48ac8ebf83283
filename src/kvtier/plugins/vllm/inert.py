"""A connector that caches nothing, for unsupported releases of vLLM, so that vLLM runs without the cache.

It accepts every call of such a release; methods without a meaning here return None.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

logger = logging.getLogger("vllm.kvtier")
"""A child of vLLM's logger: other loggers are not shown."""


def announcing(connector: Any, sentence: str) -> type:
    """A subclass of `connector` that logs `sentence` once, on the scheduler's side."""

    def start(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        if role is base.KVConnectorRole.SCHEDULER:
            logger.warning("%s", sentence)
        named = {"vllm_config": vllm_config, "role": role, "kv_cache_config": kv_cache_config}
        known = inspect.signature(connector.__init__).parameters
        connector.__init__(self, **{name: value for name, value in named.items() if name in known})

    return type("KvtierConnector", (connector,), {"__init__": start})


def inert_connector(sentence: str) -> type:
    """A connector class that logs `sentence` once and caches nothing."""
    parents = [base.KVConnectorBase_V1]
    if hasattr(base, "SupportsHMA"):  # without it, vLLM turns off the manager of hybrid models
        parents.append(base.SupportsHMA)
    abstract = {name for parent in parents for name in getattr(parent, "__abstractmethods__", ())}
    methods = dict.fromkeys(abstract, _nothing) | {
        "requires_kv_delivery": False,
        "get_num_new_matched_tokens": lambda self, request, num_computed_tokens: (0, False),
        "build_connector_meta": lambda self, scheduler_output: base.KVConnectorMetadata(),
        "request_finished": lambda self, request, block_ids: (False, None),
        "request_finished_all_groups": lambda self, request, block_ids: (False, None),
    }
    return announcing(type("InertConnector", tuple(parents), methods), sentence)


def _nothing(self: Any, *arguments: Any, **named: Any) -> None:
    pass
