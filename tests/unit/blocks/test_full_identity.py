"""The identity by all bytes: changes that samples miss, its cache, and when it is computed anew."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.blocks.full_identity import full_identity_of_folder, identity_of_folder
from kvtier.blocks.weights import weights_identity_of_folder
from kvtier.errors import ConfigError

_RECORD = ".kvtier-identity.json"
_NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtier" / "identity"


def _save(path: Path, tensors: dict[str, bytes]) -> Path:
    header, start = {}, 0
    for name, raw in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [start, start + len(raw)]}
        start += len(raw)
    head = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(tensors.values()))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    _save(tmp_path / "model" / "model.safetensors", {"a": bytes(_NBYTES), "b": b"\1" * 100})
    return tmp_path / "model"


class _Counting:
    """Progress that counts what was read."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.titles: list[str] = []

    @contextlib.contextmanager
    def __call__(self, title: str, nbytes: int) -> Iterator[Callable[[int], object]]:
        self.titles.append(title)
        yield self._advance

    def _advance(self, nbytes: int) -> None:
        self.nbytes += nbytes


def _flip(path: Path, offset: int) -> None:
    """Change one byte, and keep the file's time."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def test_a_byte_between_the_samples_changes_the_full_identity_and_not_the_sampled_one(model: Path) -> None:
    sampled, full = (identity_of_folder(model, kind) for kind in ("sampled", "full"))
    _flip(model / "model.safetensors", 20_000)
    assert identity_of_folder(model, "sampled") == sampled
    assert identity_of_folder(model, "full") != full
    assert sampled != full


def test_the_sampled_identity_is_what_it_always_was(model: Path) -> None:
    assert identity_of_folder(model, "sampled") == weights_identity_of_folder(model)
    assert weights_identity_of_folder(model) == "2efc6b9b16013cf67c8dab06d707b0b6535065047944fb309ffd9e68f0c4e89b"


def test_weights_are_read_once_and_again_when_a_file_changes(model: Path) -> None:
    progress = _Counting()
    first = full_identity_of_folder(model, progress)
    assert progress.nbytes == _NBYTES + 100
    assert progress.titles == ["Hashing model"]
    assert full_identity_of_folder(model, progress) == first
    assert progress.nbytes == _NBYTES + 100, "kept"
    _flip(model / "model.safetensors", 20_000)
    assert full_identity_of_folder(model, progress) != first
    assert progress.nbytes == 2 * (_NBYTES + 100)


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_file_that_is_another_is_read_again(model: Path, change: str) -> None:
    full_identity_of_folder(model)
    path = model / "model.safetensors"
    if change == "size":
        times = path.stat()
        _save(path, {"a": bytes(_NBYTES), "b": b"\1" * 101})
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "time":
        os.utime(path)
    else:
        times = path.stat()
        copy = model / "copy"
        copy.write_bytes(path.read_bytes())
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        copy.rename(path)
    progress = _Counting()
    full_identity_of_folder(model, progress)
    assert progress.nbytes > 0


def test_shards_and_a_copy_have_the_same_identity(model: Path, tmp_path: Path) -> None:
    _save(tmp_path / "sharded" / "one.safetensors", {"b": b"\1" * 100})
    _save(tmp_path / "sharded" / "two.safetensors", {"a": bytes(_NBYTES)})
    assert full_identity_of_folder(tmp_path / "sharded") == full_identity_of_folder(model)


def test_what_was_found_is_kept_in_the_cache_where_the_folder_cannot_be_written(model: Path, cache: Path) -> None:
    (model / _RECORD).mkdir()  # nothing can be renamed to it
    first = full_identity_of_folder(model)
    progress = _Counting()
    assert full_identity_of_folder(model, progress) == first
    assert progress.nbytes == 0
    assert len(list(cache.glob("*.json"))) == 1


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"version": 1, "files": {"model.safetensors": 3}}', b"\xff" * 100])
def test_a_record_that_is_none_is_passed_over(model: Path, raw: bytes) -> None:
    first = full_identity_of_folder(model)
    (model / _RECORD).write_bytes(raw)
    assert full_identity_of_folder(model) == first


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("spoil", ["owner", "mode"])
def test_a_record_that_somebody_else_could_have_written_is_not_believed(model: Path, spoil: str) -> None:
    full_identity_of_folder(model)
    if spoil == "owner":
        os.chown(model / _RECORD, 12345, -1)
    else:
        (model / _RECORD).chmod(0o666)
    progress = _Counting()
    full_identity_of_folder(model, progress)
    assert progress.nbytes > 0


def test_a_folder_without_weights_or_with_damaged_ones_is_refused_in_a_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors files in"):
        full_identity_of_folder(tmp_path / "nowhere")
    os.truncate(model / "model.safetensors", _NBYTES)
    with pytest.raises(ConfigError, match=r"cannot be read as safetensors: the file ends inside a tensor"):
        full_identity_of_folder(model)
