"""kvtier inside vLLM: `kv_connector` is `KvtierConnector`.

An unsupported release of vLLM starts all the same: kvtier logs one sentence and caches nothing.
"""

import importlib

import vllm

from kvtier.plugins.vllm.inert import announcing, inert_connector
from kvtier.plugins.vllm.releases import ReleaseFit, fit_of, refused, tried


def connector_for(version: str) -> type:
    """The connector class for this version of vLLM."""
    fit = fit_of(version)
    if fit is ReleaseFit.OLDER:
        return inert_connector(refused(version))
    try:
        connector: type = importlib.import_module("kvtier.plugins.vllm.connector").KvtierConnector
    except ImportError as error:
        return inert_connector(refused(version, str(error)))
    if missing := getattr(connector, "__abstractmethods__", ()):
        return inert_connector(refused(version, f"its connectors must implement {', '.join(sorted(missing))}"))
    return connector if fit is ReleaseFit.TESTED else announcing(connector, tried(version))


KvtierConnector = connector_for(vllm.__version__)

__all__ = ["KvtierConnector"]
