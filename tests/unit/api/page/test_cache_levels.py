"""What the page makes of a cache server's counts, and of counts that are none."""

from __future__ import annotations

from kvtier.api.limits import MAX_SHOWN_NAMESPACES
from kvtier.api.page.cache_levels import curve_of, namespaces_of, state_of, tiers_of, warnings_of


def test_memory_disk_and_cluster_are_tiers() -> None:
    stats = {
        "memory_bytes": 100,
        "used_bytes": 60,
        "pinned_bytes": 10,
        "held_bytes": 5,
        "blocks": 3,
        "disk_up": 1.0,
        "disk_file_space_bytes": 1000,
        "disk_used_bytes": 400,
        "disk_pinned_bytes": 300,
        "disk_blocks": 7,
        "cluster_nodes_up": 0,
    }
    memory, disk, cluster = tiers_of("cache", stats)

    assert (memory.room_bytes, memory.used_bytes, memory.pinned_bytes, memory.leased_bytes) == (100, 60, 10, 5)
    assert (disk.room_bytes, disk.used_bytes, disk.pinned_bytes, disk.blocks, disk.is_up) == (1000, 400, 300, 7, True)
    assert not cluster.is_up


def test_of_many_namespaces_the_largest_are_shown_with_their_models() -> None:
    spaces = [{"namespace": f"{number:04x}", "name": "m", "blocks": number, "used_bytes": 1} for number in range(999)]
    found, count = namespaces_of("cache", {"namespaces": spaces}, {"03e6": ["tiny"]})

    assert (len(found), count) == (MAX_SHOWN_NAMESPACES, 999)
    assert (found[0].blocks, found[0].models) == (998, ["tiny"])


def test_losses_and_curves_are_shown_where_there_are_any() -> None:
    stats = {"disk_losses": {"corrupt": 2, "late": 0}, "cluster_losses": {"down": 1}, "hit_curve": [[1, 0.1], [2, 0.5]]}

    assert state_of("cache", "unix:x", stats).losses == {"disk: corrupt": 2, "cluster: down": 1}
    curve = curve_of("cache", stats)
    assert curve is not None
    assert curve.points == [(1.0, 0.1), (2.0, 0.5)]


def test_odd_documents_show_nothing_and_raise_nothing() -> None:
    odd = {
        "memory_bytes": "x",
        "used_bytes": float("nan"),
        "namespaces": [1, None, {"blocks": "x"}],
        "disk_losses": [],
        "hit_curve": [[1], "ab", [float("inf"), 1], [1, None]],
        "warnings": [[1], None, ["x", "y", "z"], [1.0, "warning", "text"]],
        "uptime_s": None,
    }

    [memory] = tiers_of("cache", odd)
    assert (memory.room_bytes, memory.used_bytes) == (None, None)
    assert namespaces_of("cache", odd, {})[1] == 1
    assert curve_of("cache", odd) is None
    assert [one.text for one in warnings_of("cache", odd)] == ["text"]
    assert state_of("cache", "", odd).losses == {}
