"""kvtier inside vLLM: `kv_connector` is `KvtierConnector`.

It never keeps an engine from starting for the release that vLLM is of: with one that it does not work with it says so,
and caches nothing.
"""

import importlib

import vllm

from kvtier.plugins.vllm.inert import announcing, inert_connector
from kvtier.plugins.vllm.releases import Fit, fit_of, refused, tried


def connector_for(version: str) -> type:
    """The class that vLLM of this version uses."""
    fit = fit_of(version)
    if fit is Fit.OLDER:
        return inert_connector(refused(version))
    try:
        connector: type = importlib.import_module("kvtier.plugins.vllm.connector").KvtierConnector
    except ImportError as error:
        return inert_connector(refused(version, str(error)))
    if missing := getattr(connector, "__abstractmethods__", ()):
        return inert_connector(refused(version, f"its connectors have {', '.join(sorted(missing))}"))
    return connector if fit is Fit.TESTED else announcing(connector, tried(version))


KvtierConnector = connector_for(vllm.__version__)

__all__ = ["KvtierConnector"]
