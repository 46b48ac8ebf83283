"""The weights of a model folder: the contents of its safetensors files, and the tensors themselves, one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.models.weight_files import StoredTensor, read_stored_tensors


class Checkpoint:
    """The weights in one folder."""

    def __init__(self, folder: Path) -> None:
        """Read all headers. Raises `ConfigError` if there are no weights or they are incomplete."""
        self.folder = folder
        self.tensors = read_stored_tensors(folder)

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
