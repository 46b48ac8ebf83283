"""Which graph a step gets. That graphs compute what steps do is seen on a GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.device.chunk_graphs import MAX_GRAPH_TOKENS, ChunkSize, chunk_sizes, smallest_size


def test_no_graph_is_larger_than_a_step_can_be() -> None:
    sizes = chunk_sizes(max_tokens=100, max_rows=5)

    assert sizes == (ChunkSize(16, 4), ChunkSize(32, 5), ChunkSize(64, 5))
    assert chunk_sizes(max_tokens=8, max_rows=5) == ()


@given(
    num_tokens=st.integers(1, 2 * MAX_GRAPH_TOKENS),
    num_rows=st.integers(1, 300),
    max_tokens=st.integers(1, 4096),
    max_rows=st.integers(1, 512),
)
def test_a_step_gets_the_smallest_graph_with_room(
    num_tokens: int, num_rows: int, max_tokens: int, max_rows: int
) -> None:
    sizes = chunk_sizes(max_tokens, max_rows)

    found = smallest_size(sizes, num_tokens, num_rows)

    has_room = [size for size in sizes if size.num_tokens >= num_tokens and size.num_rows >= num_rows]
    assert found == min(has_room, key=lambda size: size.num_tokens, default=None)
    assert found is None or found.num_tokens <= max_tokens
