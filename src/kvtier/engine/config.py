"""The engine's settings, checked once. No torch."""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from kvtier.engine.block_manager import BlockManagerName
from kvtier.errors import ConfigError

_SCHEDULE = re.compile(r"sync|async-([1-9][0-9]?)")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run. Sizes are bytes; `None` means that the engine finds a value at start-up."""

    model: str
    revision: str | None = None
    cache_dir: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    trust_remote_code: bool = False
    dtype: str = "auto"
    quantization: Literal["fp8"] | None = None
    device: str = "auto"
    schedule: str = "async-2"
    block_manager: BlockManagerName = "prefix_caching"
    block_size: int = 16
    max_num_requests: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    kv_cache_space: int | None = None
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    salt: str = ""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_requests", "max_num_batched_tokens", "max_model_len", "kv_cache_space"):
            value = getattr(self, name)
            is_optional = name in ("max_model_len", "kv_cache_space")
            if value is None and is_optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
        if not isinstance(self.schedule, str) or not _SCHEDULE.fullmatch(self.schedule):
            raise ConfigError(f"schedule must be sync or async-N with N from 1 to 99, not {self.schedule!r}")
        if self.block_manager not in get_args(BlockManagerName):
            raise ConfigError(
                f"block_manager must be one of {', '.join(get_args(BlockManagerName))}, not {self.block_manager!r}"
            )
        utilization = self.gpu_memory_utilization
        if not isinstance(utilization, (int, float)) or not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be more than 0 and at most 1, not {utilization!r}")

    @property
    def num_steps_ahead(self) -> int:
        """How many steps may be with the device while the next one is prepared."""
        found = _SCHEDULE.fullmatch(self.schedule)
        assert found is not None
        return int(found[1] or 0)
