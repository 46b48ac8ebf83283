"""The engine's settings, checked once. No torch."""

from __future__ import annotations

import math
import re
from typing import Literal, get_args

import msgspec

from kvtier.blocks.eviction import Eviction
from kvtier.blocks.full_identity import IdentityKind
from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.errors import ConfigError
from kvtier.stores.mooncake.config import MooncakeConfig
from kvtier.stores.objects.config import ObjectsConfig
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.transport.address import check_is_one

_MOST = {
    "block_size": 1 << 16,
    "max_num_requests": 1 << 16,
    "max_num_batched_tokens": 1 << 20,
    "max_model_len": 100_000_000,
}
_SCHEDULE = re.compile(r"auto|sync|async-([1-9][0-9]?)")
_AUTO_STEPS_AHEAD = 2


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run. Sizes are bytes; `None` means that the engine chooses a value at start-up.

    `swap_space` is this host's memory for blocks, which leave it by `eviction`. `cache_server` is the address of a
    cache server: on this host (`unix:/path`), where its memory is used in place, or over TCP (`tcp://host:port`), with
    `cache_server_token`, and with TLS if `cache_server_ca_file` names the authority of its certificate. `mooncake` is a
    Mooncake pool below that, `cluster` a Valkey or Redis Cluster, `objects` an object store below all others. Blocks
    found in the tiers are loaded if that is faster than computing them, or always with `always_load`. `identity`
    distinguishes weights by samples of every tensor, or, with "full", by all of their bytes, which are read once. With
    `explain_text`, explanations of where a prompt diverged from another one show a few words of both. The share
    `canary_share` of loaded blocks is computed again while the engine is idle, and compared; 0 for none.
    """

    model: str
    revision: str | None = None
    cache_dir: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    trust_remote_code: bool = False
    dtype: str = "auto"
    quantization: Literal["fp8"] | None = None
    device: str = "auto"
    schedule: str = "auto"
    block_manager: BlockManagerName = "prefix_caching"
    block_size: int = 16
    max_num_requests: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    kv_cache_space: int | None = None
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    salt: str = ""
    swap_space: int = 0
    eviction: Eviction = "adaptive"
    cache_server: str = ""
    cache_server_token: str | None = None
    cache_server_secret: str | None = None
    cache_server_ca_file: str | None = None
    cache_server_certificate: str | None = None
    cache_server_key: str | None = None
    cache_server_timeout_s: float = 1.0
    mooncake: MooncakeConfig | None = None
    cluster: ClusterConfig | None = None
    objects: ObjectsConfig | None = None
    always_load: bool = False
    identity: IdentityKind = "sampled"
    explain_text: bool = False
    canary_share: float = 0.001

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_cache_server()
        self._check_tiers_below()
        self._check_choices()

    def _check_sizes(self) -> None:
        for name in ("block_size", "max_num_requests", "max_num_batched_tokens", "max_model_len", "kv_cache_space"):
            value = getattr(self, name)
            is_optional = name in ("max_model_len", "kv_cache_space")
            if value is None and is_optional:
                continue
            if not _is_whole(value) or value <= 0:
                raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
            if value > _MOST.get(name, value):
                raise ConfigError(f"{name} must be at most {_MOST[name]}, not {value}")
        if not _is_whole(self.swap_space) or self.swap_space < 0:
            raise ConfigError(f"swap_space must be a number of bytes, or 0 for none, not {self.swap_space!r}")
        if not _is_number(self.canary_share) or not 0 <= self.canary_share <= 1:
            raise ConfigError(f"canary_share must be from 0 to 1, not {self.canary_share!r}")
        utilization = self.gpu_memory_utilization
        if not isinstance(utilization, (int, float)) or not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be more than 0 and at most 1, not {utilization!r}")

    def _check_cache_server(self) -> None:
        check_is_one("cache_server", self.cache_server)
        for name in ("token", "secret", "ca_file", "certificate", "key"):
            value = getattr(self, f"cache_server_{name}")
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"cache_server_{name} must be text, not {value!r}")
        timeout_s = self.cache_server_timeout_s
        if not _is_number(timeout_s) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"cache_server_timeout_s must be a number of seconds, not {timeout_s!r}")

    def _check_tiers_below(self) -> None:
        for name, kind in (("mooncake", MooncakeConfig), ("cluster", ClusterConfig), ("objects", ObjectsConfig)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):  # the value may have secrets
                raise ConfigError(f"{name} must be of the type {kind.__name__}, not {type(value).__name__}")

    def _check_choices(self) -> None:
        if not isinstance(self.salt, str):
            raise ConfigError(f"salt must be text, not {self.salt!r}")
        for name in ("always_load", "explain_text"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.eviction not in ("adaptive", "lru"):
            raise ConfigError(f"eviction must be adaptive or lru, not {self.eviction!r}")
        for name, choices in (("identity", get_args(IdentityKind)), ("block_manager", get_args(BlockManagerName))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if not isinstance(self.schedule, str) or not _SCHEDULE.fullmatch(self.schedule):
            raise ConfigError(f"schedule must be auto, sync or async-N with N from 1 to 99, not {self.schedule!r}")

    def num_steps_ahead(self, device_type: str) -> int:
        """How many steps may be with the device while the next one is prepared.

        A CPU has computed a step when it is handed over: to hold its tokens back would only make them late.
        """
        if self.schedule == "auto":
            return _AUTO_STEPS_AHEAD if device_type == "cuda" else 0
        found = _SCHEDULE.fullmatch(self.schedule)
        assert found is not None
        return int(found[1] or 0)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
