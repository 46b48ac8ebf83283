"""Imports llguidance, which is optional: without it, only grammars are refused."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from kvtier.errors import InvalidParameter


@functools.cache
def _module() -> ModuleType | None:
    if importlib.util.find_spec("llguidance") is None:
        return None
    return importlib.import_module("llguidance")


def llguidance() -> ModuleType:
    """The module. Raises `InvalidParameter` if it is not installed."""
    module = _module()
    if module is None:
        raise InvalidParameter("structured output needs llguidance on the server: pip install 'kvtier[structured]'")
    return module
