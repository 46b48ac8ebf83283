"""Whatever happens to a cluster below the cache server of an engine: the same tokens, and nothing hangs."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.engine.llm import LLM
from kvtier.stores.valkey.slots import NUM_SLOTS
from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.clustered_servers import cluster_flags, num_stored
from tests.support.resp_proxy import LyingNode
from tests.support.tiered_engines import (
    Asking,
    answers,
    ask,
    assert_nothing_held,
    cold,
    open_engine,
    questions,
    settled,
)
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S, wait_until

torch.set_num_threads(1)

pytestmark = pytest.mark.slow  # each starts a cluster, three cache servers and three engines

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


class Failure(ABC):
    """One that happens to a cluster of its own, and is mended."""

    def flags(self, folder: Path) -> tuple[str, ...]:
        """More settings of a cache server."""
        return ()

    @abstractmethod
    def cluster(self) -> contextlib.AbstractContextManager[ValkeyCluster]: ...

    @abstractmethod
    def strike(self, cluster: ValkeyCluster) -> None: ...

    @abstractmethod
    def mend(self, cluster: ValkeyCluster) -> None: ...


class MovingSlots(Failure):
    def cluster(self) -> contextlib.AbstractContextManager[ValkeyCluster]:
        return valkey_cluster(2)

    def strike(self, cluster: ValkeyCluster) -> None:
        for slot in range(0, NUM_SLOTS // 2, 256):
            cluster.move_slot(cluster.primaries[0], cluster.primaries[1], slot)

    def mend(self, cluster: ValkeyCluster) -> None:
        for slot in range(0, NUM_SLOTS // 2, 256):
            cluster.move_slot(cluster.primaries[1], cluster.primaries[0], slot)


class Lies(Failure):
    """Blocks are damaged on their way, or end in the middle, by turns."""

    def __init__(self) -> None:
        self._liar: LyingNode
        self._num_told = 0

    @contextlib.contextmanager
    def cluster(self) -> Iterator[ValkeyCluster]:
        with contextlib.closing(LyingNode()) as self._liar:
            with valkey_cluster(1, 0, "--cluster-announce-port", str(self._liar.port)) as cluster:
                self._liar.target = cluster.primaries[0].port
                yield cluster

    def strike(self, cluster: ValkeyCluster) -> None:
        self._liar.lie = self._lie

    def mend(self, cluster: ValkeyCluster) -> None:
        self._liar.heal()

    def _lie(self, reply: bytes) -> bytes | None:
        self._num_told += 1
        return None if self._num_told % 8 == 0 else reply[:900] + bytes([reply[900] ^ 1]) + reply[901:]


class NoRoom(Failure):
    def cluster(self) -> contextlib.AbstractContextManager[ValkeyCluster]:
        return valkey_cluster(1, 0, "--maxmemory-policy", "noeviction")

    def strike(self, cluster: ValkeyCluster) -> None:
        cluster.call(cluster.primaries[0], b"CONFIG", b"SET", b"maxmemory", b"1000000")

    def mend(self, cluster: ValkeyCluster) -> None:
        cluster.call(cluster.primaries[0], b"CONFIG", b"SET", b"maxmemory", b"0")


class PasswordRemoved(Failure):
    def flags(self, folder: Path) -> tuple[str, ...]:
        password = folder / "password"
        password.write_text("right\n")
        return "--cluster-user", "kvtier", "--cluster-password-file", str(password)

    @contextlib.contextmanager
    def cluster(self) -> Iterator[ValkeyCluster]:
        with valkey_cluster(1) as cluster:
            self._set_user(cluster, b"on", b"~kvt1:*", b"+@all", b">right")
            yield cluster

    def strike(self, cluster: ValkeyCluster) -> None:
        self._set_user(cluster, b"<right")
        cluster.call(cluster.primaries[0], b"CLIENT", b"KILL", b"USER", b"kvtier")

    def mend(self, cluster: ValkeyCluster) -> None:
        self._set_user(cluster, b">right")

    def _set_user(self, cluster: ValkeyCluster, *words: bytes) -> None:
        cluster.call(cluster.primaries[0], b"ACL", b"SETUSER", b"kvtier", *words)


class PrimaryKilled(Failure):
    """It comes back empty, once its replica has taken over."""

    def cluster(self) -> contextlib.AbstractContextManager[ValkeyCluster]:
        return valkey_cluster(3, 3)

    def strike(self, cluster: ValkeyCluster) -> None:
        cluster.primaries[1].kill()

    def mend(self, cluster: ValkeyCluster) -> None:
        wait_until(lambda: "cluster_state:ok" in cluster.info(cluster.primaries[0]))
        cluster.primaries[1].start()


@contextlib.contextmanager
def engine_of_a_host(model: Path, flags: tuple[str, ...]) -> Iterator[LLM]:
    with cache_server(*flags, memory="16MiB") as server:
        settings = {"cache_server": server.unix, "cache_server_timeout_s": CALL_S, "max_num_batched_tokens": 40}
        with open_engine(model, **settings) as llm:
            yield llm


@functools.cache
def expected_answers(model: Path) -> list[list[list[int]]]:
    return answers(cold(model, questions()))


@pytest.mark.parametrize("make", [MovingSlots, Lies, NoRoom, PasswordRemoved, PrimaryKilled])
def test_a_failing_cluster_below_a_cache_server_costs_no_answer(
    model: Path, tmp_path: Path, make: type[Failure]
) -> None:
    """An engine is just loading what another host has stored, and storing what it computes; another one starts then."""
    failure, asked, expected = make(), questions(), expected_answers(model)
    with failure.cluster() as cluster:
        flags = (*cluster_flags(cluster, TIMEOUT_S), *failure.flags(tmp_path))
        with engine_of_a_host(model, flags) as one:
            assert answers(ask(one, asked[:6])) == expected[:6]
            settled(one)
            wait_until(lambda: num_stored(cluster) > 10)
        with engine_of_a_host(model, flags) as other:
            with Asking(other, asked) as asking:
                failure.strike(cluster)
                assert answers(asking.result()) == expected
            with engine_of_a_host(model, flags) as late:
                assert answers(ask(late, asked)) == expected
                failure.mend(cluster)
                assert answers(ask(late, asked)) == expected
                assert_nothing_held(late)
            assert answers(ask(other, asked)) == expected
            assert_nothing_held(other)
