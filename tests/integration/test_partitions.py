"""Engines on hosts of their own over one Valkey cluster, and networks that fail between them. Hosts are namespaces.

Three hosts have a node of the cluster each, two more have an engine each.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import LLM
from kvtier.engine.answer import RequestOutput
from kvtier.observe.metrics import TierMetrics
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.testing.servers import cache_server
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.cluster import open_cluster_tier
from tests.support.cluster_load import Load
from tests.support.namespaces import Host, Network, network
from tests.support.tiered_engines import (
    Asking,
    Question,
    answers,
    ask,
    assert_nothing_held,
    assert_same_answers,
    cached_by_tier,
    cold,
    full_blocks,
    num_given_up,
    open_engine,
    questions,
    settled,
    tokens,
)
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import CALL_S, wait_until

torch.set_num_threads(1)

pytestmark = pytest.mark.slow  # each starts a cluster

DEADLINE_S = 1.0
"""The deadline on a host that is cut off: a lost message costs no more than this."""


@dataclass(frozen=True)
class Site:
    """Where everything is. `near` is the host that things happen to, `far` another one with an engine."""

    joined: Network
    cluster: ValkeyCluster
    near: Host

    @property
    def nodes(self) -> list[Host]:
        return self.joined.hosts[:3]

    @property
    def far(self) -> Host:
        return self.joined.hosts[4]

    def settings(self, timeout_s: float = CALL_S, **more: Any) -> dict[str, Any]:
        seeds = tuple(f"tcp://{seed}" for seed in self.cluster.seeds)
        config = ClusterConfig(valkey=seeds, segment=3, timeout_s=timeout_s, plaintext=True)
        return {"cluster": config, "max_num_batched_tokens": 40, **more}

    def num_calls(self, name: str) -> int:
        """The number of calls of a command, over all nodes."""
        texts = [self.cluster.call(node, b"INFO", b"commandstats") for node in self.cluster.primaries]
        return sum(int(count) for text in texts for count in re.findall(rf"cmdstat_{name}:calls=(\d+)", _text(text)))


def _text(reply: object) -> str:
    assert isinstance(reply, bytes)
    return reply.decode()


@dataclass(frozen=True)
class Cut:
    """How the host with this number is cut off, and how that is undone."""

    cut: Callable[[Site], None]
    heal: Callable[[Site], None]
    host: int = 3


CUTS = {
    "one node, packets dropped": Cut(
        lambda site: site.joined.drop_between(site.near, site.nodes[:1]),
        lambda site: site.joined.pass_between(site.near, site.nodes[:1]),
    ),
    "one node, unplugged": Cut(
        lambda site: site.joined.unplug(site.nodes[0]),
        lambda site: site.joined.plug_in_again(site.nodes[0]),
    ),
    "all nodes, packets dropped": Cut(
        lambda site: site.joined.drop_between(site.near, site.nodes),
        lambda site: site.joined.pass_between(site.near, site.nodes),
    ),
    "all nodes, link down": Cut(
        lambda site: site.joined.take_down(site.near),
        lambda site: site.joined.take_up(site.near),
    ),
    "all nodes, unplugged": Cut(
        lambda site: site.joined.unplug(site.near),
        lambda site: site.joined.plug_in_again(site.near),
    ),
    "all nodes but its own, unplugged": Cut(
        lambda site: site.joined.unplug(site.near),
        lambda site: site.joined.plug_in_again(site.near),
        host=0,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture
def site() -> Iterator[Site]:
    with network(5) as joined, valkey_cluster(3, hosts=joined.hosts[:3]) as cluster:
        yield Site(joined, cluster, near=joined.hosts[3])


@dataclass(frozen=True)
class EngineOn:
    """An engine that runs its calls on its host, so that its threads are there, whichever starts them."""

    host: Host
    llm: LLM

    def ask(self, asked: Sequence[Question]) -> list[RequestOutput]:
        with self.host.entered():
            return ask(self.llm, asked)

    def compute(self, asked: Sequence[Question]) -> list[RequestOutput]:
        """Like `ask`, and wait until everything possible is stored."""
        outputs = self.ask(asked)
        settled(self.llm)
        return outputs

    @contextlib.contextmanager
    def asking(self, asked: Sequence[Question]) -> Iterator[Asking]:
        with contextlib.ExitStack() as stack:
            with self.host.entered():
                asking = stack.enter_context(Asking(self.llm, asked))
            yield asking


@contextlib.contextmanager
def engine_on(host: Host, model: Path, **settings: Any) -> Iterator[EngineOn]:
    with contextlib.ExitStack() as stack:
        with host.entered():
            llm = stack.enter_context(open_engine(model, **settings))
        yield EngineOn(host, llm)


def test_a_prefix_computed_on_one_host_is_a_hit_on_another_from_its_first_request(model: Path, site: Site) -> None:
    """Each host has a cache server of its own, which the other does not use."""
    asked = questions()
    expected = cold(model, asked)
    with contextlib.ExitStack() as stack:
        engines = []
        for host in (site.near, site.far):
            with host.entered():
                server = stack.enter_context(cache_server(memory="16MiB"))
            kept = site.settings(cache_server=server.unix)
            engines.append(stack.enter_context(engine_on(host, model, **kept)))
        first, second = engines
        assert_same_answers(first.compute(asked), expected)

        found = second.ask(asked[:1])

        assert_same_answers(found, expected[:1])
        assert cached_by_tier(found) == {"cluster": full_blocks(asked[0].prompt)}
        assert_same_answers(second.ask(asked), expected)
        for engine in engines:
            assert_nothing_held(engine.llm)


@pytest.mark.parametrize("load", ["stores", "loads"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_host_that_is_cut_off_answers_and_uses_the_cluster_again_once_it_is_healed(
    model: Path, site: Site, cut: str, load: str
) -> None:
    site = replace(site, near=site.joined.hosts[CUTS[cut].host])
    asked = [question for seed in (1, 2, 3) for question in questions(seed)]
    later = questions(4)
    expected = answers(cold(model, asked))
    with engine_on(site.far, model, **site.settings()) as far:
        if load == "loads":
            assert answers(far.compute(asked)) == expected
        command = {"stores": "set", "loads": "get"}[load]
        before = site.num_calls(command)
        with engine_on(site.near, model, **site.settings(DEADLINE_S)) as near:
            with near.asking(asked) as asking:
                wait_until(lambda: site.num_calls(command) > before, f"{load} of the cluster")
                CUTS[cut].cut(site)
                assert answers(asking.result()) == expected
            num_failed = num_given_up(near.llm)
            assert_same_answers(near.compute(later), cold(model, later))
            assert num_given_up(near.llm) > num_failed, "some of the cluster is out of reach"

            CUTS[cut].heal(site)

            wait_until(lambda: is_shared(far, near), "a hit on the host that was cut off")
            wait_until(lambda: is_shared(near, far), "a hit of what that host has stored")
            assert answers(near.ask(asked)) == expected
            assert_nothing_held(near.llm)
        assert_nothing_held(far.llm)


@contextlib.contextmanager
def engine_above_a_server(site: Site, host: Host, model: Path) -> Iterator[EngineOn]:
    """On a host with a cache server, below which is the cluster."""
    nodes = ",".join(f"tcp://{seed}" for seed in site.cluster.seeds)
    flags = ("--cluster", nodes, "--cluster-segment", "3", "--cluster-timeout", str(DEADLINE_S), "--cluster-plaintext")
    with contextlib.ExitStack() as stack:
        with host.entered():
            server = stack.enter_context(cache_server(*flags, memory="16MiB"))
        settings = {"cache_server": server.unix, "cache_server_timeout_s": CALL_S, "max_num_batched_tokens": 40}
        yield stack.enter_context(engine_on(host, model, **settings))


@pytest.mark.parametrize(
    "cut", ["one node, packets dropped", "all nodes, unplugged", "all nodes but its own, unplugged"]
)
def test_a_host_with_a_cache_server_is_cut_off(model: Path, site: Site, cut: str) -> None:
    """Its engine answers, and what either host computes is shared again once it is healed."""
    site = replace(site, near=site.joined.hosts[CUTS[cut].host])
    asked = questions()
    expected = answers(cold(model, asked))
    with engine_above_a_server(site, site.far, model) as far, engine_above_a_server(site, site.near, model) as near:
        assert answers(far.compute(asked[:3])) == expected[:3]
        wait_until(lambda: is_shared(far, near), "both reach the cluster")
        with near.asking(asked) as asking:
            CUTS[cut].cut(site)
            assert answers(asking.result()) == expected
        assert answers(near.ask(asked)) == expected
        assert_same_answers(near.compute(questions(4)), cold(model, questions(4)))

        CUTS[cut].heal(site)

        wait_until(lambda: is_shared(far, near), "a hit on the host that was cut off")
        wait_until(lambda: is_shared(near, far), "a hit of what that host has stored")
        assert_nothing_held(near.llm)
        assert_nothing_held(far.llm)


@pytest.mark.parametrize("cut", CUTS)
def test_blocks_that_a_cut_ends_half_way_are_misses_and_never_wrong(site: Site, cut: str) -> None:
    """Threads store and read all the while."""
    site = replace(site, near=site.joined.hosts[CUTS[cut].host])
    metrics = TierMetrics()
    config = site.settings(DEADLINE_S)["cluster"]
    with contextlib.ExitStack() as stack:
        with site.near.entered():
            tier = stack.enter_context(contextlib.closing(open_cluster_tier(config, LAYOUT, NAMESPACE, metrics)))
            load = stack.enter_context(Load(tier))
        load.wait_for_reads()
        for _ in range(2):
            before = num_failures(metrics)
            CUTS[cut].cut(site)
            wait_until(lambda before=before: num_failures(metrics) > before, "what is lost")  # type: ignore[misc]
            CUTS[cut].heal(site)
            load.wait_for_reads()
    assert metrics.value(metrics.failures, tier="cluster", kind="corrupt") == 0


def num_failures(metrics: TierMetrics) -> float:
    return sum(sample.value for sample in next(iter(metrics.failures.collect())).samples if "_total" in sample.name)


_seeds = iter(range(1000, 100_000))


def is_shared(computing: EngineOn, finding: EngineOn) -> bool:
    """Whether all of a new prompt that one engine has computed is a hit for another, through the cluster."""
    asked = [Question(tokens(next(_seeds), 150))]
    expected = computing.compute(asked)
    found = finding.ask(asked)
    assert_same_answers(found, expected)
    return cached_by_tier(found) == {"cluster": full_blocks(asked[0].prompt)}
