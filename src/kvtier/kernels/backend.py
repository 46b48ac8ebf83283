"""Which kernels run: Triton on a GPU, the torch twins elsewhere. The one place that knows Triton may be missing."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
from typing import Protocol, cast

import torch

from kvtier.errors import ConfigError
from kvtier.kernels import reference


class Backend(enum.Enum):
    """A set of kernels. Both compute the same function."""

    TORCH = enum.auto()
    TRITON = enum.auto()

    @classmethod
    def of(cls, device: torch.device) -> Backend:
        """The kernels for tensors on `device`. Raises `ConfigError` for a GPU without Triton."""
        if device.type != "cuda":
            return cls.TORCH
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("attention on a GPU needs Triton: pip install triton")
        return cls.TRITON


class WriteKv(Protocol):
    """Copies new keys and values into the cache; see `reference.write_kv`."""

    def __call__(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None: ...


class PagedAttention(Protocol):
    """Attends over the cache; see `reference.paged_attention`."""

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        kv_lengths: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        max_query_tokens: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class GatheredAttention(Protocol):
    """Attends over a copy of the cache's KV in one piece; see `gathered_attention`."""

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        kv_lengths: torch.Tensor,
        gather_starts: torch.Tensor,
        *,
        num_gathered_tokens: int,
        scale: float,
        out: torch.Tensor,
    ) -> None: ...


class Elementwise(Protocol):
    """The fused operations between matrix products; see `elementwise`."""

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def linear_silu_mul(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None: ...

    def quantize_rows(
        self, rows: torch.Tensor, *, max_value: float, min_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotate(
        self,
        heads: torch.Tensor,
        cos_sin: torch.Tensor,
        *,
        is_interleaved: bool,
        num_query_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> torch.Tensor: ...


def elementwise_for(tensor: torch.Tensor) -> Elementwise | None:
    """The fused operations for tensors like this one; none where plain torch has to do."""
    return _elementwise() if tensor.is_cuda else None


@functools.cache
def _elementwise() -> Elementwise | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return cast(Elementwise, importlib.import_module("kvtier.kernels.elementwise"))


@functools.cache
def write_kv_of(backend: Backend) -> WriteKv:
    if backend is Backend.TORCH:
        return reference.write_kv
    return cast(WriteKv, importlib.import_module("kvtier.kernels.kv_write").write_kv)


@functools.cache
def paged_attention_of(backend: Backend) -> PagedAttention:
    if backend is Backend.TORCH:
        return reference.paged_attention
    return cast(PagedAttention, importlib.import_module("kvtier.kernels.paged_attention").paged_attention)


@functools.cache
def gathered_attention_of(backend: Backend) -> GatheredAttention:
    assert backend is Backend.TRITON, "plain torch gathers anyway"
    return cast(GatheredAttention, importlib.import_module("kvtier.kernels.gathered_attention").gathered_attention)
