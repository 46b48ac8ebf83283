"""Translates a cache server's stats to the page's values. Unexpected values are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvtier.api.limits import MAX_SHOWN_NAMESPACES
from kvtier.api.page.view import CacheState, Curve, NamespaceState, ShownWarning, TierLevel

_MAX_POINTS = 1024


def tiers_of(name: str, stats: Mapping[str, object]) -> list[TierLevel]:
    """The server's memory, and its disk and cluster if it has them."""
    tiers = [
        TierLevel(
            name="memory",
            owner=name,
            room_bytes=_count(stats, "memory_bytes"),
            used_bytes=_count(stats, "used_bytes"),
            pinned_bytes=_count(stats, "pinned_bytes"),
            leased_bytes=_count(stats, "held_bytes"),
            blocks=_count(stats, "blocks"),
        )
    ]
    if "disk_up" in stats:
        tiers.append(
            TierLevel(
                name="disk",
                owner=name,
                room_bytes=_count(stats, "disk_file_space_bytes"),
                used_bytes=_count(stats, "disk_used_bytes"),
                pinned_bytes=_count(stats, "disk_pinned_bytes"),
                blocks=_count(stats, "disk_blocks"),
                is_up=bool(stats["disk_up"]),
            )
        )
    if "cluster_nodes_up" in stats:
        tiers.append(TierLevel(name="cluster", owner=name, is_up=bool(stats["cluster_nodes_up"])))
    return tiers


def state_of(name: str, address: str, stats: Mapping[str, object]) -> CacheState:
    uptime_s = stats.get("uptime_s")
    return CacheState(
        name=name,
        address=address,
        status="ready",
        uptime_s=uptime_s if isinstance(uptime_s, float) else None,
        clients=_count(stats, "clients"),
        leases=_count(stats, "leases"),
        blocks=_count(stats, "blocks"),
        evicted_blocks=_count(stats, "evicted_blocks"),
        hit_blocks=_count(stats, "hit_blocks"),
        missed_blocks=_count(stats, "missed_blocks"),
        losses={**_losses(stats, "disk"), **_losses(stats, "cluster")},
    )


def namespaces_of(
    cache: str, stats: Mapping[str, object], models: Mapping[str, list[str]]
) -> tuple[list[NamespaceState], int]:
    """The largest namespaces, and their total number; `models` has model names by namespace."""
    given = stats.get("namespaces")
    spaces = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    found = [
        NamespaceState(
            namespace=str(one.get("namespace", "")),
            cache=cache,
            name=str(one.get("name", "")),
            models=models.get(str(one.get("namespace", "")), []),
            tenant=str(one.get("tenant", "")),
            blocks=_count(one, "blocks") or 0,
            bytes=_count(one, "used_bytes") or 0,
            disk_blocks=_count(one, "disk_blocks") or 0,
        )
        for one in spaces
    ]
    found.sort(key=lambda one: (one.blocks + one.disk_blocks, one.namespace), reverse=True)
    return found[:MAX_SHOWN_NAMESPACES], len(found)


def curve_of(cache: str, stats: Mapping[str, object]) -> Curve | None:
    """The hit rates that other memory sizes would have had with the recent traffic; None if the server has none."""
    given = stats.get("hit_curve")
    if not isinstance(given, list):
        return None
    points = [
        (float(point[0]), float(point[1]))
        for point in given[:_MAX_POINTS]
        if isinstance(point, (list, tuple)) and len(point) == 2 and all(map(_is_number, point))
    ]
    return Curve(cache=cache, points=points) if points else None


def warnings_of(source: str, stats: Mapping[str, object]) -> list[ShownWarning]:
    given = stats.get("warnings")
    return [
        ShownWarning(at=float(one[0]), level=str(one[1]), text=str(one[2]), source=source)
        for one in (given if isinstance(given, list) else [])
        if isinstance(one, (list, tuple)) and len(one) == 3 and _is_number(one[0])
    ]


def _losses(stats: Mapping[str, object], place: str) -> dict[str, int]:
    given = stats.get(f"{place}_losses")
    if not isinstance(given, dict):
        return {}
    return {f"{place}: {kind}": count for kind, count in given.items() if isinstance(count, int) and count}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _count(stats: Mapping[str, object], name: str) -> int | None:
    value = stats.get(name)
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
