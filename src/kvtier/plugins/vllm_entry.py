"""vLLM's entry point (`vllm.general_plugins`), called by each of its processes: registers the connector by name."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "KvtierConnector"


def register() -> None:
    """Make `"kv_connector": "KvtierConnector"` work without a module path. A second call does nothing."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvtier.plugins.vllm", NAME)
