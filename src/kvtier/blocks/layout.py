"""The one block format: the KV of `block_tokens` consecutive tokens, all layers, as one run of bytes.

The run is laid out `[layer][kv_head][token][K then V]` (LHNC). The run is the same in a GPU arena, in host
memory, on the wire and in a file; only the stride between runs is rounded up, for direct I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError

SLOT_ALIGN_BYTES = 4096

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def slot_bytes_of(block_bytes: int) -> int:
    """The stride of a block of `block_bytes` in arenas and files."""
    return -(-block_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The shape of one block. `layers` and `kv_heads` are those in the block, not in the whole model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(layers, kv_heads, block_tokens, 2 * head_dim)`: how to view a block's bytes as an array."""
        return (self.layers, self.kv_heads, self.block_tokens, 2 * self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.layers * self.kv_heads * self.block_tokens * 2 * self.head_dim * self.itemsize

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueLayout(KvLayout):
    """A block of `nbytes` whose format only its engine knows, for `block_tokens` tokens or for the state after them.

    The engine and its format must be part of the namespace.
    """

    nbytes: int
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    dtype: str = "opaque"

    def __post_init__(self) -> None:
        for name in ("nbytes", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{name} must be a positive whole number, not {value!r}")

    @property
    def itemsize(self) -> int:
        return 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (1, 1, 1, self.nbytes)

    @property
    def block_bytes(self) -> int:
        return self.nbytes
