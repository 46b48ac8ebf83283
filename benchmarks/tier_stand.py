"""Shared by the benchmarks of tiers below the device: engines with tiers, and checks of the hits by tier.

The clock is wall time unless a benchmark says otherwise: threads beside the engine's and a cache server's process are
part of the measurement. On a CPU torch has one thread, which leaves a core to the others.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import console
from benchmarks.model_configs import MODEL_CONFIGS
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Round, Variant, kv_bytes_of
from benchmarks.prefix_caching.options import device_settings, make_parser
from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.transfer.copiers.cuda_copier import CudaCopier

BLOCK_TOKENS = 16
DEVICE_ON: BlockManagerName = "prefix_caching"
DEVICE_OFF: BlockManagerName = "disable_prefix_caching"
BELOW = ("host", "server", "disk")
WALL = "time on the wall"

_PATIENCE_S = 120.0
_LEAST_OF_HITS = 0.8
"""A smaller share of the expected hits is a failure; a single late load is not."""


@dataclass(frozen=True)
class Tiers:
    """The tiers below the device, as settings of `EngineConfig`."""

    name: str
    settings: Mapping[str, object]
    server: ServerProcess | None = None

    def server_cpu_s(self) -> float:
        """CPU time of the server's process so far."""
        if self.server is None:
            return 0.0
        fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


@contextlib.contextmanager
def host_tiers(nbytes: int) -> Iterator[Tiers]:
    """The engine's own memory."""
    yield Tiers("host", {"swap_space": nbytes})


@contextlib.contextmanager
def server_tiers(nbytes: int, *, is_tcp: bool, swap_space: int = 0) -> Iterator[Tiers]:
    """A cache server in its own process, on this host or over TCP."""
    with cache_server("--max-leased", str(nbytes), memory=str(nbytes), tcp=is_tcp) as server:
        settings: dict[str, object] = {"cache_server": server.unix, "swap_space": swap_space}
        if is_tcp:
            settings |= {"cache_server": server.tcp, "cache_server_token": server.token}
        yield Tiers("server over TCP" if is_tcp else "server", settings, server)


def make_tier_parser(description: str, gpu_shape: str) -> argparse.ArgumentParser:
    parser = make_parser(description, gpu_shape)
    parser.add_argument("--input-tokens", type=int, help="how long a prompt is")
    parser.add_argument("--always-load", action="store_true", help="load what is found, however long it takes")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw it (needs matplotlib)")
    return parser


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tcp", action="store_true", help="the cache server over TCP, not through shared memory")
    parser.add_argument("--swap-space", type=int, default=0, metavar="BYTES", help="host memory before the server")


def chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given, with lists as tuples."""
    given = {name: getattr(arguments, name) for name in names}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value is not None
    }


def settings_of(arguments: argparse.Namespace, size: object, cpu_clock: str = WALL) -> dict[str, object]:
    return {
        "shape": arguments.model_shape,
        **device_settings(arguments.device, cpu_clock),
        **vars(size),
        "quick": arguments.quick,
    }


def kv_bytes(arguments: argparse.Namespace, num_tokens: int) -> int:
    """The size of `num_tokens` of KV, with some blocks to spare."""
    itemsize = 4 if MODEL_CONFIGS[arguments.model_shape]["torch_dtype"] == "float32" else 2
    return kv_bytes_of(arguments.model_shape, num_tokens + 8 * BLOCK_TOKENS, itemsize)


def open_stand(
    arguments: argparse.Namespace,
    tiers: Tiers | None,
    *,
    kv_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    **settings: Any,
) -> EngineStand:
    """An engine above `tiers`. On a CPU its own KV has room for `kv_tokens`; on a GPU it takes the free memory."""
    space = kv_bytes(arguments, kv_tokens) if arguments.device == "cpu" else None
    below = {} if tiers is None else dict(tiers.settings)
    return EngineStand(
        arguments.model_shape,
        arguments.device,
        clock=clock,
        kv_cache_space=space,
        **{"always_load": getattr(arguments, "always_load", False), **below, **settings},
    )


def warm_up(stand: EngineStand, maker: PromptMaker, count: int, length: int, num_outputs: int = 2) -> None:
    """Warm up, untimed: compute, store, load, hit the device's cache; then wait until copies have their full speed."""
    prompts = maker.make(count, length)
    for variant in (Variant(DEVICE_ON), Variant(DEVICE_OFF), Variant("naive", has_tiers=False)):
        stand.use(variant)
        stand.run(prompts, num_outputs)
        stand.run(prompts[:1], num_outputs)
        stand.settle()
    _wait_for_registration(stand)


def drop_below(stand: EngineStand) -> None:
    """Empty the tiers below the device."""
    stand.settle()
    traffic = stand.llm.engine.transfer.traffic
    if traffic is not None:
        for guard in traffic.hierarchy.guards:
            guard.tier.drop()


def full_share(length: int, shared: int | None = None) -> float:
    """The share that can come from a cache of full blocks that has the first `shared` tokens: never the last."""
    known = length if shared is None else shared
    return min(known // BLOCK_TOKENS * BLOCK_TOKENS, length - 1) / length


def expect_hits(done: Round, tiers: Sequence[str], share: float, what: str) -> None:
    """Check that `share` of the prompts' tokens came from `tiers`, and none from elsewhere."""
    found = sum(done.shares.get(tier, 0.0) for tier in tiers)
    others = done.cached_share - found
    if not _LEAST_OF_HITS * share - 1e-9 <= found <= share + 1e-9 or others > 0.01:
        expected = f"{share:.3f} of {' and '.join(tiers)}" if share else "nothing"
        raise RuntimeError(f"{what}: expected {expected} to be cached, found {shown_shares(done.shares)}")


def expect_tokens(found: Round, expected: Round, device: str, what: str) -> None:
    """Check equal answers. On a GPU sums differ with the size of a batch, and random weights have close calls."""
    pairs = list(zip(found.tokens, expected.tokens, strict=True))
    same = sum(one == other for one, other in pairs) / len(pairs)
    if device == "cpu" and same < 1:
        raise RuntimeError(f"{what}: {1 - same:.0%} of the answers are others than without the cache")
    first = sum(one[0] == other[0] for one, other in pairs) / len(pairs)
    if first < 0.5:
        raise RuntimeError(f"{what}: only {first:.0%} of the first tokens are those of the run without the cache")


def shown_shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{tier} {share:.2f}" for tier, share in shares.items() if share >= 0.005) or "-"


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def _wait_for_registration(stand: EngineStand) -> None:
    """Wait for registration: a GPU copies at full speed only from registered memory, which takes a while."""
    traffic = stand.llm.engine.transfer.traffic
    copier = None if traffic is None else traffic._copier
    if traffic is None or not isinstance(copier, CudaCopier):
        return
    for guard in traffic.hierarchy.guards:
        client = getattr(guard.tier, "client", None)
        if client is not None and not client.is_local:
            continue  # its blocks pass through the host's tier
        arena = getattr(guard.tier if client is None else client, "arena", None)
        registration = None if arena is None else copier.registration(arena)
        if registration is not None and not registration.wait(_PATIENCE_S):
            console.print(f"[yellow]the memory of {guard.tier.name} could not be registered: copies are slow")
