"""Builds the tiers below the device from settings: host memory, a cache server, a pool, a cluster, objects."""

from __future__ import annotations

from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.connecting import connect
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.observe.metrics import TierMetrics
from kvtier.tiers.cluster import open_cluster_tier
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostTier
from kvtier.tiers.mooncake import open_mooncake_tier
from kvtier.tiers.objects import open_object_tier
from kvtier.tiers.remote import RemoteTier
from kvtier.tiers.tier import Tier

_MIN_STAGING_BYTES = 256 << 20
_MAX_STAGING_BYTES = 4 << 30
"""Limits on the host memory for blocks over TCP if the engine has none of its own; otherwise as much as the
device's."""

_MIN_STAGED_BLOCKS = 64


def has_tiers(config: EngineConfig) -> bool:
    """Whether there is anything below the device."""
    below = (config.cache_server, config.swap_space, config.mooncake, config.cluster, config.objects)
    return any(below)


def make_hierarchy(
    config: EngineConfig, layout: KvLayout, fields: NamespaceFields, name: str, *, device_bytes: int
) -> Hierarchy | None:
    """None if there are no tiers. A cache server need not answer now: it is used once it does.

    `device_bytes` is the device's memory for blocks.
    Raises `ConfigError` or `TierRefused` with one sentence for settings that cannot work.
    """
    metrics = TierMetrics()
    tiers: list[Tier] = []
    try:
        if config.cache_server:
            tiers.append(_server_tier(config, layout, fields, name, metrics))
        if config.mooncake is not None:
            tiers.append(open_mooncake_tier(config.mooncake, layout, fields.digest(), metrics))
        if config.cluster is not None:
            tiers.append(open_cluster_tier(config.cluster, layout, fields, metrics, model=name))
        if config.objects is not None:
            tiers.append(open_object_tier(config.objects, layout, fields.digest(), metrics))
        swap_space = config.swap_space
        if not swap_space and not all(tier.is_local for tier in tiers):
            wanted = min(_MAX_STAGING_BYTES, device_bytes)
            swap_space = max(_MIN_STAGING_BYTES, wanted, _MIN_STAGED_BLOCKS * layout.slot_bytes)
        if swap_space:
            if swap_space < layout.slot_bytes:
                raise ConfigError(f"swap_space {swap_space} holds no block of {layout.slot_bytes} bytes")
            is_last = all(tier.is_local for tier in tiers)  # else the others are fed from what it stores
            tiers.insert(0, HostTier(layout, swap_space, eviction=config.eviction, declines=is_last))
        return Hierarchy(tiers, metrics=metrics) if tiers else None
    except BaseException:
        for tier in tiers:
            tier.close()
        raise


def _server_tier(
    config: EngineConfig, layout: KvLayout, fields: NamespaceFields, name: str, metrics: TierMetrics
) -> RemoteTier:
    client = connect(
        config.cache_server,
        layout=layout,
        namespace=fields,
        name=name,
        token=config.cache_server_token,
        secret=config.cache_server_secret,
        ca_file=config.cache_server_ca_file,
        certificate=config.cache_server_certificate,
        key=config.cache_server_key,
        timeout_s=config.cache_server_timeout_s,
        metrics=metrics,
        must_answer=False,
        takes_declines=True,
    )
    return RemoteTier(client)
