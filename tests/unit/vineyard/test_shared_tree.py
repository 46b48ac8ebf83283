"""Two cache objects on one tree, against a model of it: sequences as they are stored, found, used and pruned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.vineyard.kv_tensor import TokenTensors
from tests.support.examples import examples
from tests.support.vineyard_tensors import empty, expect, found, open_cache, store

_CAPACITY = 9
_names = itertools.count()
_caches = st.integers(0, 1)
_sequences = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with cache_server(memory="16MiB") as running:
        yield running


class _Tree(RuleBasedStateMachine):
    """The model is every stored sequence with the time of its last use; the longer one was used first."""

    socket = ""

    def __init__(self) -> None:
        super().__init__()
        name = f"tree {next(_names)}"
        self.caches = [open_cache(self.socket, capacity=_CAPACITY, name=name) for _ in range(2)]
        self.used: dict[tuple[int, ...], tuple[int, int]] = {}
        self.now = 0
        self.kept: list[tuple[list[int], list[TokenTensors]]] = []

    def _num_leading(self, tokens: list[int]) -> int:
        ends = (end for end in range(len(tokens), 0, -1) if tuple(tokens[:end]) in self.used)
        return next(ends, 0)

    def _use(self, tokens: list[int]) -> None:
        self.now += 1
        for end in range(1, len(tokens) + 1):
            self.used[tuple(tokens[:end])] = (self.now, -end)

    @rule(cache=_caches, tokens=_sequences)
    def update(self, cache: int, tokens: list[int]) -> None:
        self._update(cache, tokens, 0)

    @precondition(lambda self: self.used)
    @rule(cache=_caches, data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def extend(self, cache: int, data: st.DataObject, tokens: list[int]) -> None:
        prefix = list(data.draw(st.sampled_from(sorted(self.used))))[: _CAPACITY - 3]
        self._update(cache, prefix + tokens, len(prefix))

    @rule(cache=_caches, tokens=_sequences, cut=st.integers(1, 5))
    def update_behind_anything(self, cache: int, tokens: list[int], cut: int) -> None:
        self._update(cache, tokens, min(cut, len(tokens) - 1))

    def _update(self, cache: int, tokens: list[int], cut: int) -> None:
        stored = store(self.caches[cache], tokens[cut:], tokens[:cut])

        if self._num_leading(tokens) < cut:
            assert stored == 0
            return
        assert stored == len(tokens) - cut
        self._use(tokens)
        while len(self.used) > _CAPACITY:
            del self.used[min(self.used, key=self.used.__getitem__)]

    @rule(cache=_caches, tokens=_sequences)
    def query(self, cache: int, tokens: list[int]) -> None:
        count = found(self.caches[cache], tokens)

        assert count == self._num_leading(tokens)
        self._use(tokens[:count])

    @rule(cache=_caches, tokens=_sequences)
    def keep(self, cache: int, tokens: list[int]) -> None:
        kv = empty(len(tokens))
        count = self.caches[cache].query(tokens, kv)
        self._use(tokens[:count])
        self.kept.append((tokens, kv[:count]))

    @precondition(lambda self: self.used)
    @rule(cache=_caches, data=st.data())
    def query_again(self, cache: int, data: st.DataObject) -> None:
        self.query(cache, list(data.draw(st.sampled_from(sorted(self.used)))))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))

    @rule(cache=_caches)
    def release(self, cache: int) -> None:
        self.kept = []
        self.caches[cache].release()

    @invariant()
    def the_server_holds_what_the_model_does(self) -> None:
        cache = self.caches[0]
        expected = {cache._chain.hashes(sequence)[-1] for sequence in self.used}
        assert {block_hash for block_hash, _ in cache._writer.list_blocks()} == expected

    @invariant()
    def what_is_kept_stays_as_it_is(self) -> None:
        for tokens, kv in self.kept:
            expect(tokens, kv)

    def teardown(self) -> None:
        self.kept = []
        for cache in self.caches:
            cache.close()


def test_two_cache_objects_share_one_tree_and_prune_it_alike(server):
    class Tree(_Tree):
        socket = server.unix

    run_state_machine_as_test(Tree, settings=settings(max_examples=examples(80), stateful_step_count=25, deadline=None))
