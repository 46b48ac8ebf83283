"""The room in a cache, read from its server's statistics."""

from __future__ import annotations

import pytest

from kvtier.client.room import Room, room_of

_MEMORY = {"memory_bytes": 800, "free_bytes": 300, "pinned_bytes": 0}


@pytest.mark.parametrize(
    ("stats", "room"),
    [
        (_MEMORY, Room("memory", 300, 700)),
        (_MEMORY | {"pinned_bytes": 200}, Room("memory", 300, 600)),
        (_MEMORY | {"cluster_nodes_up": 3.0}, Room("memory", 300, 800)),
        (_MEMORY | {"pinnable_bytes": 50}, Room("memory", 300, 700, 50)),
        (_MEMORY | {"disk_up": 1.0, "disk_file_space_bytes": 900, "disk_used_bytes": 100}, Room("disk", 800, 900)),
        (_MEMORY | {"disk_up": 0.0}, Room("memory", 300, 700)),
    ],
)
def test_one_prompt_can_have_what_is_not_pinned_and_never_all_of_a_memory_with_nothing_below(
    stats: dict[str, object], room: Room
) -> None:
    assert room_of(stats) == room
