"""What the file cache is told, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.vineyard import FileCacheConfig, FilesystemType, KVCache, KVTensor


def test_the_defaults_are_vineyards() -> None:
    config = FileCacheConfig()

    assert (config.chunk_size, config.split_number, config.root) == (16, 2, "/tmp/vineyard/llm_cache")
    assert config.filesystem_type is FilesystemType.LOCAL
    assert (config.client_gc_interval, config.ttl) == (1800, 1800)
    assert config.enable_global_gc is False
    assert (config.global_gc_interval, config.global_ttl) == (10800, 10800)


def test_settings_may_come_by_position_as_in_vineyard() -> None:
    assert FileCacheConfig(8, 3, "/cache").root == "/cache"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", -1),
        ("chunk_size", 2.5),
        ("chunk_size", "16"),
        ("chunk_size", True),
        ("split_number", 0),
        ("split_number", 9),
        ("root", ""),
        ("root", None),
        ("root", "a\0b"),
        ("filesystem_type", "local"),
        ("client_gc_interval", 0),
        ("ttl", -5),
        ("ttl", "1800"),
        ("ttl", float("nan")),
        ("ttl", 10**400),
        ("root", "\ud800"),
        ("enable_global_gc", 1),
        ("global_gc_interval", float("inf")),
        ("global_ttl", True),
        ("io_workers", 0),
    ],
)
def test_a_wrong_type_or_size_is_a_value_error_that_names_the_setting(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        FileCacheConfig(**{name: value})  # type: ignore[arg-type]


def test_sizes_may_be_numpys(tmp_path: Path) -> None:
    config = FileCacheConfig(
        chunk_size=np.int64(4),  # type: ignore[arg-type]
        split_number=np.uint8(2),  # type: ignore[arg-type]
        io_workers=np.int32(2),  # type: ignore[arg-type]
        root=str(tmp_path),
    )
    assert config == FileCacheConfig(4, 2, str(tmp_path), io_workers=2)
    assert {type(size) for size in (config.chunk_size, config.split_number, config.io_workers)} == {int}
    sizes = np.array([16, 64, 2])
    with KVCache(config, sizes[0], sizes[1], sizes[2]) as cache:
        memory = np.arange(16, dtype=np.uint8)
        tensors = [[(KVTensor(memory.ctypes.data, 16),) * 2] * 2] * 4

        assert cache.update(None, range(4), tensors) == 4  # type: ignore[arg-type]
        assert (type(cache.layer), cache.layer) == (int, 2)


@pytest.mark.parametrize("config", [None, "files", {"chunk_size": 16}, object()])
def test_a_config_of_another_type_is_a_value_error(config: object) -> None:
    with pytest.raises(ValueError, match="cache_config must be"):
        KVCache(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tensor_bytes", "cache_capacity", "layer"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
def test_a_size_that_is_none_is_an_error_at_construction(tmp_path: Path, name: str, value: object) -> None:
    sizes: dict[str, object] = {"tensor_bytes": 16, "cache_capacity": 64, "layer": 2, name: value}

    with pytest.raises(ConfigError, match=name):
        KVCache(FileCacheConfig(root=str(tmp_path)), **sizes)  # type: ignore[arg-type]


def test_a_capacity_below_one_chunk_is_an_error_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="10 tokens has no room for one chunk of 16"):
        KVCache(FileCacheConfig(root=str(tmp_path)), tensor_bytes=16)


def test_chunks_that_no_file_can_hold_are_an_error_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a chunk of 16 tokens, 65536 layers and 1048576 bytes a tensor has"):
        KVCache(FileCacheConfig(root=str(tmp_path)), tensor_bytes=1 << 20, cache_capacity=64, layer=1 << 16)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_a_folder_is_an_error_at_construction(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        KVCache(FileCacheConfig(root=str(tmp_path / "file")), tensor_bytes=16, cache_capacity=16)


def test_a_cache_of_files_closes_with_its_scope_and_may_be_closed_again(tmp_path: Path) -> None:
    with KVCache(FileCacheConfig(root=str(tmp_path)), tensor_bytes=16, cache_capacity=16) as cache:
        assert cache.query([1], [[(KVTensor(0, 0), KVTensor(0, 0))]]) == 0
        assert cache.stats()["hit_chunks"] == 0
        cache.release()
        with pytest.raises(ConfigError, match="no addresses"):
            cache.query_addresses([1])
    cache.close()

    with pytest.raises(TierUnavailable, match="closed"):
        cache.query([], [])


def test_a_cache_that_nobody_has_any_more_gives_back_its_threads(tmp_path: Path) -> None:
    cache = KVCache(FileCacheConfig(root=str(tmp_path)), tensor_bytes=16, cache_capacity=16)

    del cache  # the leak check says whether its threads are gone

    assert list((tmp_path / "__temp").iterdir()) == []
