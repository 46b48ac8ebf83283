"""Engines with tiers below the device, for the tests of this folder: where to look, what to ask, what is left over.

A block of the tiny model is 8 KiB. Prompts are long enough for a dozen blocks and share prefixes.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvtier
from kvtier import LLM, SamplingParams
from kvtier.client.client import CacheClient
from kvtier.engine.answer import Completion, RequestOutput
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tiny_models import VOCAB_SIZE
from kvtier.tiers.host import HostTier
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

BLOCK_TOKENS = 16
BLOCK_BYTES = 8192
MAX_TOKENS = 20
LONGEST_PROMPT = 200
TIERS = ("host", "unix", "tcp", "disk", "host+unix", "host+tcp")

GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    params: SamplingParams = GREEDY


def tokens(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB_SIZE) for _ in range(count)]


def questions(seed: int = 1) -> list[Question]:
    """Shared prefixes, the same prompt twice, several answers, lengths around the ends of blocks."""
    trunk = tokens(seed, LONGEST_PROMPT)
    sampled = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        *(Question(trunk[:150] + tokens(seed + count, count)) for count in (3, 17, 40)),
        Question(tokens(-seed, 120)),
        Question(trunk[:160]),
        Question(trunk[:160]),
        Question(trunk[:161], sampled),
        Question(trunk[:15]),
        Question(trunk[:16]),
        Question(trunk[:17]),
        Question(tokens(-seed, 64), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=2)),
    ]


def open_engine(model: Path, **settings: Any) -> LLM:
    """Loads whatever is found, unless told otherwise: hits can be counted then."""
    values = {"device": "cpu", "dtype": "float32", "kv_cache_space": 512 * BLOCK_BYTES, "always_load": True}
    return LLM(str(model), **{**values, **settings})


def ask(llm: LLM, asked: Sequence[Question]) -> list[RequestOutput]:
    return llm.generate([one.prompt for one in asked], [one.params for one in asked], progress=False)


def answers(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """The tokens of every answer."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def cached(completion: Completion) -> dict[str, int]:
    """Tokens by tier, without those that gave none."""
    return {tier: count for tier, count in completion.cached_tokens.items() if count}


def cached_by_tier(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for output in outputs:
        for completion in output.outputs:
            for tier, count in cached(completion).items():
                sums[tier] = sums.get(tier, 0) + count
    return sums


def full_blocks(prompt: Sequence[int]) -> int:
    """Tokens in the blocks that can be cached of a prompt, but for the last one, which is always computed."""
    return min(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS, len(prompt) - 1)


def assert_same_answers(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    assert answers(found) == answers(expected)
    for one, other in zip(found, expected, strict=True):
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert (mine.text, mine.finish_reason) == (its.text, its.finish_reason)
            for some, others in zip(mine.logprobs or [], its.logprobs or [], strict=True):
                assert some.keys() == others.keys()
                assert all(abs(some[token_id] - others[token_id]) < 1e-4 for token_id in some)


def cold(model: Path, asked: Sequence[Question]) -> list[RequestOutput]:
    """The answers of an engine without tiers."""
    with open_engine(model, schedule="sync", block_manager="naive") as llm:
        return ask(llm, asked)


def failures(llm: LLM, **labels: str) -> float:
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    return traffic.hierarchy.metrics.value(traffic.hierarchy.metrics.failures, **labels)


def settled(llm: LLM) -> None:
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    assert traffic.settle(LIMIT_S), "stores take too long"


def num_given_up(llm: LLM) -> float:
    """Blocks that a tier refused, and calls of tiers that failed."""
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    metrics = traffic.hierarchy.metrics
    found = [
        sample
        for counter in (metrics.failures, metrics.refused_blocks)
        for sample in next(iter(counter.collect())).samples
    ]
    return sum(sample.value for sample in found if sample.name.endswith("_total"))


def assert_nothing_held(llm: LLM) -> None:
    """No block of the device, no slot of the host and no thread's work is left of requests that are over."""
    engine = llm.engine
    traffic = engine.transfer.traffic
    assert traffic is not None
    settled(llm)
    engine.step()  # takes back what was copied
    blocks = engine.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks, "blocks of the device were leaked"
    assert not traffic.storer.has_stores
    for guard in traffic.hierarchy.guards:
        if isinstance(guard.tier, HostTier):
            _wait_until_free(guard.tier)


def _wait_until_free(host: HostTier) -> None:
    wait_until(lambda: not host._pool.referenced_units)


@dataclass
class Tiers:
    """The needs of a kind of tier, and the engine's settings for it."""

    kind: str
    settings: dict[str, Any]
    server: ServerProcess | None = None
    far: str = "server"
    """Where what survives the engine comes from."""
    first: str = ""
    """Where the engine that stored something finds it again."""

    @contextlib.contextmanager
    def operator(self) -> Iterator[CacheClient]:
        assert self.server is not None
        with kvtier.connect(self.server.unix, timeout_s=CALL_S) as client:
            yield client

    def write_out(self) -> None:
        """Wait until a server that keeps blocks on disk alone has none of them in memory any more."""
        if self.kind == "disk":
            with self.operator() as client:
                client.flush()
                wait_until(lambda: not client.stats()["blocks"])

    def assert_nothing_held(self) -> None:
        """The server has no lease and no unfinished slot."""
        if self.server is None:
            return
        with self.operator() as client:
            wait_until(lambda: _held(client) == (0, 0, 0))


def _held(client: CacheClient) -> tuple[object, object, object]:
    stats = client.stats()
    return stats["leases"], stats["reservations"], stats["held_bytes"]


@contextlib.contextmanager
def tiers(kind: str, *, host_bytes: int = 16 << 20, memory: str = "16MiB", disk: str = "32MiB") -> Iterator[Tiers]:
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {}
        if "host" in kind:
            settings["swap_space"] = host_bytes
        if kind == "host":
            yield Tiers(kind, settings, far="", first="host")
            return
        options: list[str] = []
        if kind == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-"))
            options = ["--folder", f"{folder}/disk", "--disk", disk, "--disk-only"]
        server = stack.enter_context(cache_server(*options, memory=memory, tcp="tcp" in kind))
        if "tcp" in kind:
            settings |= {"cache_server": server.tcp, "cache_server_token": server.token}
        else:
            settings["cache_server"] = server.unix
        first = "disk" if kind == "disk" else "server" if kind == "unix" else "host"
        yield Tiers(kind, settings, server, far="disk" if kind == "disk" else "server", first=first)


class Asking:
    """Questions asked on a thread of their own, so that something can happen meanwhile."""

    def __init__(self, llm: LLM, asked: Sequence[Question]) -> None:
        self._llm = llm
        self._asked = asked
        self._outputs: list[RequestOutput] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="asking")

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def result(self, timeout_s: float = LIMIT_S) -> list[RequestOutput]:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"no answer within {timeout_s} s"
        if self._error is not None:
            raise self._error
        assert self._outputs is not None
        return self._outputs

    def _run(self) -> None:
        try:
            self._outputs = ask(self._llm, self._asked)
        except BaseException as error:
            self._error = error
