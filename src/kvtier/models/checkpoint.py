"""The safetensors files of a model folder: which tensors they hold, and the tensors themselves, one at a time.

Headers are read and checked first, so that a missing shard or a cut file is told before gigabytes have been read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtier.blocks.weights import MALFORMED, read_safetensors_header, tensor_range
from kvtier.errors import ConfigError
from kvtier.models.json_object import JsonObject, read_json_object
from kvtier.observe.printable import printable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_DIMENSIONS = 64
_ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8} | {
    name: bits for bits in (8, 16, 32, 64) for name in (f"I{bits}", f"U{bits}")
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file. `dtype` is named as safetensors does (`BF16`); `start` counts from the header's end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int

    @property
    def is_integer(self) -> bool:
        return self.dtype.startswith(("I", "U"))


class Checkpoint:
    """The weights in one folder."""

    def __init__(self, folder: Path) -> None:
        """Read all headers. Raises `ConfigError` when there are no weights or they are not whole."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        index = folder / INDEX_FILE
        named = _read_index(index) if index.is_file() else {}
        for path in sorted({folder / file for file in named.values()}) if named else [_single_file(folder)]:
            if not path.is_file():
                raise ConfigError(f"{index} names {printable(path.name)}, which is not in the folder")
            for tensor in _read_header(path):
                self.tensors[tensor.name] = tensor
        for name, file in named.items():
            if name not in self.tensors or self.tensors[name].path.name != file:
                raise ConfigError(f"{index} says that {printable(name)} is in {printable(file)}, but it is not")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self) -> Iterator[tuple[StoredTensor, Tensor]]:
        """Every tensor, in the order of the files. A tensor is mapped memory: use it before asking for the next."""
        by_place = sorted(self.tensors.values(), key=lambda tensor: (tensor.path, tensor.start))
        for path, tensors in itertools.groupby(by_place, key=lambda tensor: tensor.path):
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for tensor in tensors:
                        yield tensor, file.get_tensor(tensor.name)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE_FILE).is_file():
        return folder / SINGLE_FILE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"{folder} has {len(files)} *.safetensors files but no {INDEX_FILE}")
    raise ConfigError(f"{folder} has no *.safetensors files: there are no weights to load")


def _read_index(path: Path) -> dict[str, str]:
    weight_map = JsonObject(read_json_object(path), str(path)).inner("weight_map").values
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or not file or "\0" in file or len(file) > 255:
            raise ConfigError(f"{path}: the file of {printable(name)} must be a file name, not {printable(repr(file))}")
    if not weight_map:
        raise ConfigError(f"{path}: weight_map is empty")
    return dict(weight_map)


def _read_header(path: Path) -> list[StoredTensor]:
    try:
        with path.open("rb") as file:
            entries, first_byte = read_safetensors_header(file)
            tensors = [_tensor(name, entry, path) for name, entry in entries.items()]
            found = path.stat().st_size - first_byte
            expected = max((tensor.start + tensor.nbytes for tensor in tensors), default=0)
            if found != expected:
                raise ValueError(f"it should hold {expected} bytes of tensors and holds {found}")
            return tensors
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {printable(str(error))}") from error


def _tensor(name: str, entry: dict[str, Any], path: Path) -> StoredTensor:
    start, end = tensor_range(entry)
    shape = tuple(entry["shape"])
    dtype = entry["dtype"]
    if not all(isinstance(size, int) and 0 <= size < 1 << 60 for size in shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"the shape of {name} is none")
    if dtype in _ITEM_BITS and math.prod(shape) * _ITEM_BITS[dtype] != 8 * (end - start):
        raise ValueError(f"the shape and the length of {name} do not agree")
    return StoredTensor(name, dtype, shape, path, start, end - start)
