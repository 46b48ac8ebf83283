"""Finds the tensors in the safetensors files of a model folder, from their headers. No torch.

All headers are read and checked, so that a missing shard or a truncated file is reported before gigabytes are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.blocks.weights import MALFORMED, read_safetensors_header, tensor_range
from kvtier.errors import ConfigError
from kvtier.models.foreign_files import refuse_gguf_folder, refuse_lfs_pointer
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
    """One tensor in a file. `dtype` is named as in safetensors (`BF16`); `start` counts from the header's end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int

    @property
    def is_integer(self) -> bool:
        return self.dtype.startswith(("I", "U"))


def read_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Tensors by name. Raises `ConfigError` if there are no weights or they are incomplete."""
    index = folder / INDEX_FILE
    named = _read_index(index) if index.is_file() else {}
    tensors: dict[str, StoredTensor] = {}
    for path in sorted({folder / file for file in named.values()}) if named else [_single_file(folder)]:
        if not path.is_file():
            raise ConfigError(f"{index} names {printable(path.name)}, which is not in the folder")
        for tensor in _read_header(path):
            tensors[tensor.name] = tensor
    for name, file in named.items():
        if name not in tensors or tensors[name].path.name != file:
            raise ConfigError(f"{index} says that {printable(name)} is in {printable(file)}, but it is not")
    return tensors


def has_all_files(folder: Path) -> bool:
    """Whether every file of the weights is present; an interrupted download lacks some."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    return all((folder / file).is_file() for file in set(_read_index(index).values()))


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE_FILE).is_file():
        return folder / SINGLE_FILE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"{folder} has {len(files)} *.safetensors files but no {INDEX_FILE}")
    refuse_gguf_folder(folder)
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
    refuse_lfs_pointer(path)
    try:
        with path.open("rb") as file:
            entries, first_byte = read_safetensors_header(file)
            tensors = [_tensor(name, entry, path) for name, entry in entries.items()]
            found = path.stat().st_size - first_byte
            expected = max((tensor.start + tensor.nbytes for tensor in tensors), default=0)
            if found != expected:
                raise ValueError(f"it should hold {expected} bytes of tensors, but holds {found}")
            return tensors
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {printable(str(error))}") from error


def _tensor(name: str, entry: dict[str, Any], path: Path) -> StoredTensor:
    start, end = tensor_range(entry)
    shape = tuple(entry["shape"])
    dtype = entry["dtype"]
    if not all(isinstance(size, int) and 0 <= size < 1 << 60 for size in shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"the shape of {name} is invalid")
    if dtype in _ITEM_BITS and math.prod(shape) * _ITEM_BITS[dtype] != 8 * (end - start):
        raise ValueError(f"the shape and the length of {name} do not agree")
    return StoredTensor(name, dtype, shape, path, start, end - start)
