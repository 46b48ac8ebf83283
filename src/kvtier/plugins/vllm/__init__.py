"""kvtier inside vLLM: `kv_connector_module_path` is this package, `kv_connector` is `KvtierConnector`."""

from kvtier.plugins.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]
