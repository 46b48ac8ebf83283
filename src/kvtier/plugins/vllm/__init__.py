"""kvtier inside vLLM: `kv_connector_module_path` is this package, `kv_connector` is `KvtierConnector`."""

import vllm

try:
    from kvtier.plugins.vllm.connector import KvtierConnector
except ImportError as error:
    raise ImportError(
        f"kvtier's plug-in is written for vLLM 0.32, and this is {vllm.__version__}: {error}", name=error.name
    ) from error

__all__ = ["KvtierConnector"]
