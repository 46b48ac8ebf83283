"""vLLM's entry point (`vllm.general_plugins`), called by each of its processes: makes the connector's name enough."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "KvtierConnector"


def register() -> None:
    """`"kv_connector": "KvtierConnector"` is enough from now on. A second call does nothing."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvtier.plugins.vllm", NAME)
