"""The names that Vineyard's programs import, and what the log says of settings without effect."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvtier import vineyard
from kvtier.vineyard import KVCache, config, ignored_settings
from kvtier.vineyard.ignored_settings import log_ignored


def test_vineyards_imports_need_only_another_package_name() -> None:
    assert config.FileCacheConfig is vineyard.FileCacheConfig
    assert config.VineyardCacheConfig is vineyard.VineyardCacheConfig
    assert {"KVCache", "KVTensor"} <= set(vineyard.__all__)


def test_settings_without_effect_are_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ignored_settings, "_said", set())
    caplog.set_level(logging.INFO, logger=ignored_settings.__name__)

    for _ in range(2):
        log_ignored(config.VineyardCacheConfig(socket="/tmp/none.sock"))
        with KVCache(config.FileCacheConfig(chunk_size=2, root=str(tmp_path)), tensor_bytes=16):
            pass
    lines = [record.getMessage() for record in caplog.records]
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    for name in ("block_size", "sync_interval", "llm_cache_sync_lock", "llm_ref_cnt_object_name"):
        assert name in lines[0]
    assert "FileCacheConfig: filesystem_type without effect" in lines[1]

    caplog.clear()
    for _ in range(2):
        log_ignored(config.VineyardCacheConfig(socket="/tmp/none.sock", block_size=16))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("VineyardCacheConfig: block_size without effect")
