"""The file cache against a dict: two clients of one folder, files damaged and removed, writes that fail."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tests.support.examples import examples
from tests.support.faulty_files import FaultyFiles
from tests.support.vineyard_files import CHUNK, chunk_paths, found, make_older, open_files, store, temp_names

_CAPACITY_CHUNKS = 12
_CLIENTS = st.integers(0, 1)


class FileCaches(RuleBasedStateMachine):
    """The model is the set of prefixes, as tuples of whole chunks, that were stored and not lost since.

    What is evicted is known only to the folder: after an eviction the model believes what it finds there, but only as
    much as was ever stored.
    """

    sequences = Bundle("sequences")

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.files = FaultyFiles()
        self.caches = [
            open_files(self.root, capacity=_CAPACITY_CHUNKS * CHUNK, files=self.files, ttl=1000, global_ttl=1000)
            for _ in range(2)
        ]
        self.stored: set[tuple[int, ...]] = set()
        self.num_evicted = 0

    def teardown(self) -> None:
        for cache in self.caches:
            cache.close()
        shutil.rmtree(self.root)

    @rule(target=sequences, parts=st.lists(st.integers(0, 2), max_size=4))
    def add_sequence(self, parts: list[int]) -> object:
        return multiple(tuple(part * 10 + number for part in parts for number in range(CHUNK)))

    @rule(client=_CLIENTS, tokens=sequences, tail=st.integers(0, CHUNK - 1), split=st.integers(0, 4))
    def update(self, client: int, tokens: tuple[int, ...], tail: int, split: int) -> None:
        prefix = tokens[: min(split * CHUNK, len(tokens))]
        expected_prefix = self._leading(prefix) == len(prefix)
        count = store(self.caches[client], [*tokens[len(prefix) :], *([99] * tail)], prefix)
        self._follow_evictions()
        if not expected_prefix:
            assert count == 0
            return
        assert count == len(tokens) - len(prefix), "four chunks always fit"
        self.stored |= {tokens[:end] for end in range(len(prefix) + CHUNK, len(tokens) + 1, CHUNK)}

    @rule(client=_CLIENTS, tokens=sequences)
    def query(self, client: int, tokens: tuple[int, ...]) -> None:
        assert found(self.caches[client], tokens) == self._leading(tokens)

    @rule(client=_CLIENTS, tokens=sequences, number=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def fail_to_store(self, client: int, tokens: tuple[int, ...], number: int) -> None:
        before = self._leading(tokens)
        self.files.fail("write", number)
        assert store(self.caches[client], tokens) == before
        self.files.heal()
        self._follow_evictions()
        assert not temp_names(self.root)

    @rule(client=_CLIENTS, tokens=sequences, to_bytes=st.sampled_from([0, 100, 4096, 4100]))
    def damage(self, client: int, tokens: tuple[int, ...], to_bytes: int) -> None:
        known = [end for end in range(CHUNK, len(tokens) + 1, CHUNK) if tokens[:end] in self.stored]
        if not known or self._leading(tokens) != len(tokens):
            return
        name = self.caches[client]._names.of(tokens)[-1]
        os.truncate(self.caches[client]._store.path_of(name), to_bytes)
        self.stored.discard(tokens)
        assert found(self.caches[1 - client], tokens) == len(tokens) - CHUNK

    @rule(client=_CLIENTS)
    def collect_old(self, client: int) -> None:
        for path in chunk_paths(self.root)[::2]:
            make_older(path, 2000)
        self.caches[client].collect()
        self._believe()

    @rule(client=_CLIENTS)
    def open_anew(self, client: int) -> None:
        self.caches[client].close()
        self.caches[client] = open_files(
            self.root, capacity=_CAPACITY_CHUNKS * CHUNK, files=self.files, ttl=1000, global_ttl=1000
        )
        self.num_evicted = sum(cache.stats()["evicted_chunks"] for cache in self.caches)

    @invariant()
    def bound_holds(self) -> None:
        assert len(chunk_paths(self.root)) <= _CAPACITY_CHUNKS

    def _leading(self, tokens: tuple[int, ...]) -> int:
        end = 0
        while end < len(tokens) and tokens[: end + CHUNK] in self.stored:
            end += CHUNK
        return end

    def _follow_evictions(self) -> None:
        num_evicted = sum(cache.stats()["evicted_chunks"] for cache in self.caches)
        if num_evicted != self.num_evicted:
            self.num_evicted = num_evicted
            self._believe()

    def _believe(self) -> None:
        names = {path.name for path in chunk_paths(self.root)}
        self.stored = {tokens for tokens in self.stored if self.caches[0]._names.of(tokens)[-1].file_name in names}


TestFileCaches = FileCaches.TestCase
TestFileCaches.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
