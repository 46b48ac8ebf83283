"""What the shared-memory half is told."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.vineyard import VineyardCacheConfig


def test_the_defaults_are_vineyards():
    config = VineyardCacheConfig(socket="/run/cache.sock")

    assert (config.block_size, config.sync_interval) == (5, 3)
    assert config.llm_cache_sync_lock == "llmCacheSyncLock"
    assert config.llm_cache_object_name == "llm_cache_object"
    assert config.llm_ref_cnt_object_name == "llm_refcnt_object"


def test_a_path_is_a_unix_address():
    given = ["/run/a.sock", "unix:/run/b.sock", "tcp://host:1"]

    addresses = [VineyardCacheConfig(socket=socket).address for socket in given]
    assert addresses == ["unix:/run/a.sock", "unix:/run/b.sock", "tcp://host:1"]


def test_several_servers_are_a_cluster():
    with pytest.raises(ConfigError, match=r"socket takes one address.*cluster:"):
        VineyardCacheConfig(socket=["/run/a.sock", "/run/b.sock"])


@pytest.mark.parametrize(
    "fields",
    [
        {"socket": ""},
        {"socket": []},
        {"socket": [3]},
        {"socket": "tcp://host"},
        {"socket": "/" + "x" * 200},
        {"socket": "/a", "block_size": 0},
        {"socket": "/a", "sync_interval": -1},
        {"socket": "/a", "llm_cache_object_name": ""},
        {"socket": "/a", "timeout_s": 0},
        {"socket": "/a", "timeout_s": -1.0},
        {"socket": "/a", "timeout_s": "1"},
        {"socket": "/a", "timeout_s": None},
        {"socket": "/a", "timeout_s": True},
        {"socket": "/a", "timeout_s": float("nan")},
        {"socket": "/a", "timeout_s": float("inf")},
        {"socket": "/a", "llm_cache_object_name": "\ud800"},
        {"socket": "/a", "llm_cache_sync_lock": "\ud800"},
        {"socket": "/\ud800"},
        {"socket": "tcp://host:1", "token": "\ud800"},
        {"socket": None},
        {"socket": 3},
        {"socket": b"/a"},
        {"socket": ["/a", "/a"]},
        {"socket": "/a", "llm_cache_sync_lock": 3},
        {"socket": "tcp://host:1", "token": 3},
        {"socket": "tcp://host:1", "token": ""},
        {"socket": "tcp://host:1", "token": "12345678", "ca_file": 3},
    ],
)
def test_what_cannot_work_is_refused(fields):
    with pytest.raises(ConfigError):
        VineyardCacheConfig(**fields)


def test_numbers_of_numpy_are_numbers():
    config = VineyardCacheConfig(
        socket="/a", block_size=np.int64(4), sync_interval=np.uint8(1), timeout_s=np.float32(0.5)
    )

    assert (config.block_size, config.sync_interval, config.timeout_s) == (4, 1, 0.5)
    assert [type(value) for value in (config.block_size, config.sync_interval, config.timeout_s)] == [int, int, float]
