"""The identity of a model's weights, over safetensors files written by hand."""

from __future__ import annotations

import json
import os
import random
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtier.blocks.weights import (
    SAMPLE_BYTES,
    TensorSample,
    sample_ranges,
    weights_identity,
    weights_identity_of_folder,
)
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    raw: bytes
    dtype: str = "F16"


def tensor(name: str, rows: int = 100, columns: int = 100) -> Tensor:
    return Tensor(name, (rows, columns), random.Random(name).randbytes(rows * columns * 2))


PINNED = "f500fd8bdfc8d187fd15947befe40929e81a92da415fc3879da7085fabd5c0ec"
MODEL = (tensor("embed"), tensor("layer.0.k"), tensor("layer.0.v", 3, 5))


def write_file(path: Path, tensors: tuple[Tensor, ...], metadata: dict[str, str] | None = None) -> None:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for one in tensors:
        header[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [start, start + len(one.raw)],
        }
        start += len(one.raw)
    write_raw(path, json.dumps(header).encode(), b"".join(one.raw for one in tensors))


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def identity_of(folder: Path, *files: tuple[Tensor, ...]) -> str:
    for number, tensors in enumerate(files):
        write_file(folder / f"model-{number}.safetensors", tensors)
    return weights_identity_of_folder(folder)


def with_byte_flipped(one: Tensor, position: int) -> Tensor:
    raw = bytearray(one.raw)
    raw[position] ^= 1
    return replace(one, raw=bytes(raw))


def test_a_sharded_and_a_merged_checkpoint_are_the_same(tmp_path: Path) -> None:
    merged = identity_of(tmp_path / "merged", MODEL)

    assert identity_of(tmp_path / "sharded", MODEL[:1], MODEL[1:]) == merged
    assert identity_of(tmp_path / "reversed", MODEL[::-1]) == merged


def test_the_identity_is_the_same_on_every_machine(tmp_path: Path) -> None:
    raw = bytes(range(256)) * 64

    assert identity_of(tmp_path, (Tensor("w", (64, 128), raw),)) == (
        weights_identity([TensorSample("w", "F16", (64, 128), (raw[:4096], raw[6144:10240], raw[-4096:]))])
    )
    assert identity_of(tmp_path, (Tensor("w", (64, 128), raw),)) == PINNED


def test_where_and_when_the_files_were_written_does_not_count(tmp_path: Path) -> None:
    before = identity_of(tmp_path / "a", MODEL)
    write_file(tmp_path / "b" / "renamed.safetensors", MODEL, metadata={"format": "pt"})
    os.utime(tmp_path / "b" / "renamed.safetensors", (1, 1))

    assert weights_identity_of_folder(tmp_path / "b") == before


@pytest.mark.parametrize(
    "changed",
    [
        replace(MODEL[0], name="embed2"),
        replace(MODEL[0], dtype="BF16"),
        replace(MODEL[0], shape=(50, 200)),
        with_byte_flipped(MODEL[0], 0),
        with_byte_flipped(MODEL[0], SAMPLE_BYTES - 1),
        with_byte_flipped(MODEL[0], len(MODEL[0].raw) // 2),
        with_byte_flipped(MODEL[0], -1),
    ],
    ids=["name", "dtype", "shape", "first byte", "end of the first sample", "middle", "last byte"],
)
def test_any_change_to_a_tensor_makes_other_weights(tmp_path: Path, changed: Tensor) -> None:
    before = identity_of(tmp_path / "before", MODEL)

    assert identity_of(tmp_path / "after", (changed, *MODEL[1:])) != before


def test_a_tensor_more_or_less_makes_other_weights(tmp_path: Path) -> None:
    assert identity_of(tmp_path / "less", MODEL[:2]) != identity_of(tmp_path / "all", MODEL)


def test_two_tensors_that_trade_their_bytes_make_other_weights(tmp_path: Path) -> None:
    first, second = MODEL[:2]
    traded = (replace(first, raw=second.raw), replace(second, raw=first.raw))

    assert identity_of(tmp_path / "traded", traded) != identity_of(tmp_path / "before", (first, second))


@pytest.mark.parametrize("nbytes", [0, 1, 100, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 * SAMPLE_BYTES, 10**9 + 1])
def test_samples_lie_inside_the_tensor_and_reach_both_ends(nbytes: int) -> None:
    (first, first_bytes), (middle, middle_bytes), (last, last_bytes) = sample_ranges(nbytes)

    assert first == 0
    assert last + last_bytes == nbytes
    assert first <= middle <= last
    assert first_bytes == middle_bytes == last_bytes == min(nbytes, SAMPLE_BYTES)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 100) + b'{"w": {"dty',
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"w": {}}',
        struct.pack("<Q", 9) + b'{"w": []}',
    ],
    ids=["empty", "short", "huge header", "cut header", "no text", "list", "no offsets", "entry is a list"],
)
def test_a_broken_file_is_named_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="cannot be read as safetensors") as caught:
        weights_identity_of_folder(tmp_path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F16", "shape": [4], "data_offsets": [0, 9]},
        {"dtype": "F16", "shape": [4], "data_offsets": [8, 0]},
        {"dtype": "F16", "shape": [4], "data_offsets": [0, 1 << 80]},
        {"dtype": "F16", "shape": [4], "data_offsets": ["0", "8"]},
        {"dtype": "F16", "shape": [4], "data_offsets": [0]},
        {"dtype": "F16", "shape": 4, "data_offsets": [0, 8]},
        {"shape": [4], "data_offsets": [0, 8]},
    ],
    ids=["past the end", "backwards", "beyond any file", "text", "one offset", "shape", "no dtype"],
)
def test_an_entry_that_makes_no_sense_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    write_raw(tmp_path / "model.safetensors", json.dumps({"w": entry}).encode(), bytes(8))

    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        weights_identity_of_folder(tmp_path)


def test_a_header_shorter_than_the_file_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 100) + b"{}")

    with pytest.raises(ConfigError):
        weights_identity_of_folder(tmp_path)


def test_a_header_nested_without_end_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", b"[" * 100_000)

    with pytest.raises(ConfigError):
        weights_identity_of_folder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")

    with pytest.raises(ConfigError, match=r"no \*\.safetensors files"):
        weights_identity_of_folder(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()

    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        weights_identity_of_folder(tmp_path)
