"""Vineyard's settings that have no effect here: the log says so once per process. Any thread."""

from __future__ import annotations

import logging

import msgspec

from kvtier.vineyard.file_config import FileCacheConfig
from kvtier.vineyard.vineyard_config import VineyardCacheConfig

logger = logging.getLogger(__name__)

_REASONS: dict[type[VineyardCacheConfig | FileCacheConfig], tuple[tuple[str, ...], str]] = {
    VineyardCacheConfig: (
        ("block_size", "sync_interval", "llm_cache_sync_lock", "llm_ref_cnt_object_name"),
        "tokens are kept one by one, and every process sees an update at once",
    ),
    FileCacheConfig: (("filesystem_type",), "all filesystems are used alike, by rename alone"),
}
_said: set[tuple[str, ...]] = set()


def log_ignored(config: VineyardCacheConfig | FileCacheConfig) -> None:
    """Log once which settings of `config` have no effect: a warning if one of them is not the default."""
    names, reason = _REASONS[type(config)]
    changed = tuple(name for name in names if getattr(config, name) != _default_of(type(config), name))
    shown = changed or names
    if shown not in _said:
        _said.add(shown)
        level = logging.WARNING if changed else logging.INFO
        logger.log(level, "%s: %s without effect: %s", type(config).__name__, ", ".join(shown), reason)


def _default_of(kind: type[msgspec.Struct], name: str) -> object:
    return next(field.default for field in msgspec.structs.fields(kind) if field.name == name)
