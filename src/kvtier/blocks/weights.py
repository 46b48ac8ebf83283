"""The identity of a model's weights: per tensor its name, dtype, shape and a hash of three 4 KiB samples.

Reading the whole of a 60 GB checkpoint at every start would cost a minute; names, shapes and samples of every
tensor cost milliseconds and still change with any training step. The paths and times of the files, and how
tensors are spread over them, do not count.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20
_MAX_OFFSET = 1 << 60
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, struct.error)
"""Errors that reading a malformed header raises."""


@dataclass(frozen=True, slots=True)
class TensorSample:
    """One tensor's share of the identity. `samples` are its first, middle and last `SAMPLE_BYTES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    samples: tuple[bytes, bytes, bytes]


def sample_ranges(nbytes: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """`(offset, length)` of the first, middle and last sample of a tensor of `nbytes`."""
    length = min(nbytes, SAMPLE_BYTES)
    return (0, length), ((nbytes - length) // 2, length), (nbytes - length, length)


def weights_identity(tensors: Iterable[TensorSample]) -> str:
    """A hex digest over all tensors, whatever their order."""
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        head = json.dumps([tensor.name, tensor.dtype, list(tensor.shape)], separators=(",", ":"))
        digest.update(hashlib.sha256(head.encode()).digest())
        digest.update(hashlib.sha256(b"".join(tensor.samples)).digest())
    return digest.hexdigest()


def weights_identity_of_folder(folder: Path) -> str:
    """The identity of the `*.safetensors` files in `folder`; a sharded and a merged checkpoint are the same.

    Raises `ConfigError` if there are none, or one cannot be read as safetensors.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"no *.safetensors files in {folder}")
    return weights_identity(tensor for path in paths for tensor in _samples_of_file(path))


def read_safetensors_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """A safetensors file's entries by tensor name, and where the tensors' bytes begin. Raises `ValueError`."""
    first = file.read(8)
    if len(first) < 8:
        raise ValueError("it is shorter than 8 bytes")
    (header_bytes,) = struct.unpack("<Q", first)
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {header_bytes} bytes")
    raw = file.read(header_bytes)
    if len(raw) != header_bytes:
        raise ValueError("it ends inside its header")
    entries: dict[str, Any] = json.loads(raw)
    entries.pop("__metadata__", None)
    return entries, 8 + header_bytes


def tensor_range(entry: dict[str, Any]) -> tuple[int, int]:
    """Where a tensor's bytes begin and end, counted from the header's end. Raises one of `MALFORMED`."""
    start, end = entry["data_offsets"]
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end < _MAX_OFFSET:
        raise ValueError("a tensor's bytes end before they begin")
    return start, end


def _samples_of_file(path: Path) -> Iterable[TensorSample]:
    try:
        with path.open("rb") as file:
            entries, first_byte = read_safetensors_header(file)
            for name, entry in entries.items():
                start, end = tensor_range(entry)
                samples = []
                for offset, length in sample_ranges(end - start):
                    file.seek(first_byte + start + offset)
                    samples.append(file.read(length))
                    if len(samples[-1]) != length:
                        raise ValueError(f"the file ends inside {name}")
                first, middle, last = samples
                yield TensorSample(name, entry["dtype"], tuple(entry["shape"]), (first, middle, last))
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {printable(str(error))}") from error
