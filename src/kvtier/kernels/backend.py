"""Which kernels run: Triton on a GPU, the torch twins elsewhere. The one place that knows Triton may be missing."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Protocol, cast

import torch

from kvtier.errors import ConfigError
from kvtier.kernels import reference, tuning
from kvtier.kernels.quantized_rows import QuantizedRows
from kvtier.kernels.rotation import Rotation


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


class RotateAndWrite(Protocol):
    """Like `write_kv` for keys that are rotated on the way, as queries are; see `reference.rotate_and_write`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor: ...


class PagedAttention(Protocol):
    """Attends over the cache; see `paged_attention`."""

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        kv_lengths: torch.Tensor,
        counters: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        max_query_tokens: int,
        shares: torch.Tensor | None = None,
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

    def quantized_rms_norm(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        max_value: float,
        min_scale: float,
    ) -> tuple[QuantizedRows, torch.Tensor]: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def linear_silu_mul(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None: ...

    def quantize_rows(
        self, rows: torch.Tensor, *, max_value: float, min_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class PlainProduct(Protocol):
    """Products of a few tokens with weights in 16 bits; see `plain_product`."""

    def make_counters(self, outputs: int, device: torch.device) -> torch.Tensor: ...

    def linear(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counters: torch.Tensor
    ) -> torch.Tensor | None: ...


class Fp8Product(Protocol):
    """Products of a few tokens with weights in 8-bit floats; see `fp8_product`."""

    def make_counters(self, outputs: int, device: torch.device) -> torch.Tensor: ...

    def linear(
        self,
        hidden: torch.Tensor | QuantizedRows,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        counters: torch.Tensor,
        *,
        max_value: float,
        min_scale: float,
        peaks: torch.Tensor | None = None,
    ) -> torch.Tensor | None: ...

    def linear_silu_mul(
        self,
        hidden: torch.Tensor | QuantizedRows,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        counters: torch.Tensor,
        *,
        max_value: float,
        min_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor] | None: ...


class Int4Product(Protocol):
    """Products of a few tokens with weights in 4 bits; see `int4_product`."""

    def make_counters(self, outputs: int, device: torch.device) -> torch.Tensor: ...

    def can_pack(self, *, inputs: int, group_size: int) -> bool: ...

    def pack(self, qweight: torch.Tensor, order: torch.Tensor) -> torch.Tensor: ...

    def linear(
        self,
        hidden: torch.Tensor,
        words: torch.Tensor,
        zeros: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        counters: torch.Tensor,
    ) -> torch.Tensor | None: ...

    def dequantize(
        self, words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor: ...


class ArgmaxTokens(Protocol):
    """The likeliest token of each row of logits; see `reference.argmax_tokens`."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor: ...


class Forbid(Protocol):
    """Forbids tokens in rows of logits; see `reference.forbid`."""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None: ...


def elementwise_for(tensor: torch.Tensor) -> Elementwise | None:
    """The fused operations for tensors like this one; None if plain torch has to do."""
    return cast("Elementwise | None", _triton_kernels("elementwise")) if tensor.is_cuda else None


def plain_product_for(tensor: torch.Tensor) -> PlainProduct | None:
    """The kernels for products of a few tokens in 16 bits; None as above."""
    is_used = tuning.HAS_FEW_TOKEN_PRODUCTS and tensor.is_cuda
    return cast("PlainProduct | None", _triton_kernels("plain_product")) if is_used else None


def fp8_product_for(tensor: torch.Tensor) -> Fp8Product | None:
    """The kernels for products of a few tokens in 8 bits; None as above."""
    return cast("Fp8Product | None", _quantized_products("fp8_product", tensor))


def int4_product_for(tensor: torch.Tensor) -> Int4Product | None:
    """The kernels for products of a few tokens in 4 bits; None as above."""
    return cast("Int4Product | None", _quantized_products("int4_product", tensor))


def argmax_tokens_for(tensor: torch.Tensor) -> ArgmaxTokens:
    """The kernel for logits like these."""
    kernels = _triton_kernels("argmax") if tensor.is_cuda else None
    return reference.argmax_tokens if kernels is None else cast(ArgmaxTokens, kernels.argmax_tokens)


def forbid_for(tensor: torch.Tensor) -> Forbid:
    """The kernel for logits like these."""
    kernels = _triton_kernels("token_mask") if tensor.is_cuda else None
    return reference.forbid if kernels is None else cast(Forbid, kernels.forbid)


def _quantized_products(name: str, tensor: torch.Tensor) -> ModuleType | None:
    return _triton_kernels(name) if tuning.HAS_QUANTIZED_PRODUCTS and tensor.is_cuda else None


@functools.cache
def _triton_kernels(name: str) -> ModuleType | None:
    """The module of that name, None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"kvtier.kernels.{name}")


@functools.cache
def write_kv_of(backend: Backend) -> WriteKv:
    if backend is Backend.TORCH:
        return reference.write_kv
    return cast(WriteKv, importlib.import_module("kvtier.kernels.kv_write").write_kv)


@functools.cache
def rotate_and_write_of(backend: Backend) -> RotateAndWrite:
    if backend is Backend.TORCH:
        return reference.rotate_and_write
    return cast(RotateAndWrite, importlib.import_module("kvtier.kernels.kv_write").rotate_and_write)


@functools.cache
def paged_attention_of(backend: Backend) -> PagedAttention:
    assert backend is Backend.TRITON, "plain torch attends by groups of rows"
    return cast(PagedAttention, importlib.import_module("kvtier.kernels.paged_attention").paged_attention)


@functools.cache
def gathered_attention_of(backend: Backend) -> GatheredAttention:
    assert backend is Backend.TRITON, "plain torch gathers anyway"
    return cast(GatheredAttention, importlib.import_module("kvtier.kernels.gathered_attention").gathered_attention)
