"""An agents' trace through real engines and cache servers: LRU and ours taking turns, beside what a simulation says.

    python -m benchmarks.eviction.served [--quick] [--json FILE] [--trace FILE]

Some sessions of the trace, scaled down: four of its blocks become one of 16 tokens, answers have one token, and the
next request comes as soon as the one before was answered and stored. Each policy has a cache server in a process of its
own, with half of the memory that all blocks would take (`--oversubscription`), and an engine with a tiny model, whose
own cache is off. Every request goes to one and then to the other. `mean_ttft_over_lru` and `p90_ttft_over_lru` compare
times to the first token within the run; `points_off` is how far the measured shares of hits are from those of
`kvtier.simulate` with the arrivals that there were. Without a trace, and with `--quick`, the traffic is made up. Ends
with status 1 when a figure misses its bar.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.eviction.synthetic import synthetic_traces
from benchmarks.harness import Result, console, finish, make_parser, print_table, read_options
from kvtier.blocks.eviction import Eviction
from kvtier.engine.llm import LLM
from kvtier.engine.sampling_params import SamplingParams
from kvtier.planning.trace_forms import coarsened
from kvtier.simulate.costs import Costs
from kvtier.simulate.shapes import GPUS, shape_of
from kvtier.simulate.tiers import TierSettings, replay_tiers, share_of_sorted
from kvtier.simulate.trace import TracedRequest, by_arrival, read_traces
from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model

BARS = {"points_off": "<= 2", "mean_ttft_over_lru": "<= 1"}
BLOCK_TOKENS = 16
JOINED_BLOCKS = 4
POLICIES: tuple[Eviction, ...] = ("lru", "adaptive")
TRACE = Path("../shared/traces/agentic_100.jsonl.gz")
VOCABULARY = 256
MAX_TOKENS = 8192
_SETTLE_S = 60.0
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclasses.dataclass
class Served:
    """The answers of one policy's engine: each request's arrival, its time to the first token, and its hits."""

    llm: LLM
    arrived_s: list[float] = dataclasses.field(default_factory=list)
    ttfts_s: list[float] = dataclasses.field(default_factory=list)
    hit_tokens: int = 0

    def ask(self, prompt: list[int], started_at: float) -> None:
        before = time.perf_counter()
        (output,) = self.llm.generate([prompt], _ONE_TOKEN, progress=False)
        self.ttfts_s.append(time.perf_counter() - before)
        self.arrived_s.append(before - started_at)
        if output.error is not None:
            raise RuntimeError(f"a prompt was refused: {output.error}")
        self.hit_tokens += sum(output.outputs[0].cached_tokens.values())
        traffic = self.llm.engine.transfer.traffic
        if traffic is None or not traffic.settle(_SETTLE_S):
            raise RuntimeError(f"blocks were not stored after {_SETTLE_S:.0f} s")


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--trace", type=Path, help=f"[default: {TRACE}, if it is there]")
    parser.add_argument("--oversubscription", type=float, default=2.0, help="all blocks over those of memory")
    options, arguments = read_options(parser, ())
    num_sessions, num_requests = (4, 40) if options.quick else (12, 300)
    path = arguments.trace or (TRACE if TRACE.exists() and not options.quick else None)
    requests = _sampled(path, num_sessions)[:num_requests]
    distinct = len({number for request in requests for number in request.hashes})
    memory_blocks = max(
        int(distinct / arguments.oversubscription), 2 * max(len(request.hashes) for request in requests) + 2
    )
    settings = {"requests": len(requests), "distinct_blocks": distinct, "memory_blocks": memory_blocks}
    result = Result("eviction.served", {**settings, "trace": path.name if path else "made up"})
    console.print(f"{len(requests)} requests, {distinct} different blocks, {memory_blocks} blocks of memory")
    served = _serve(requests, memory_blocks)
    result.figures = _figures(requests, memory_blocks, served, result)
    print_table("share of prompt tokens that hit, and times to the first token", result.rows)
    return finish(result, BARS, options.json)


def _sampled(path: Path | None, num_sessions: int) -> list[TracedRequest]:
    """The requests of the first sessions, in the blocks of the served model."""
    if path is None:
        requests: Sequence[TracedRequest] = synthetic_traces()["chats"]
    else:
        requests = [coarsened(request, JOINED_BLOCKS) for request in by_arrival(read_traces(path))]
        sessions = list(dict.fromkeys(request.session for request in requests))[:num_sessions]
        requests = [request for request in requests if request.session in sessions]
    return [
        dataclasses.replace(request, input_length=BLOCK_TOKENS * len(request.hashes) + 1)
        for request in requests
        if len(request.hashes) * BLOCK_TOKENS < MAX_TOKENS
    ]


def _prompt(request: TracedRequest) -> list[int]:
    """Tokens that follow from the blocks' numbers, and one more: the last token of a prompt is always computed."""
    tokens = [token for number in request.hashes for token in random.Random(number).choices(range(VOCABULARY), k=16)]
    return [*tokens, 0]


def _serve(requests: Sequence[TracedRequest], memory_blocks: int) -> dict[Eviction, Served]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, contextlib.ExitStack() as stack:
        save_tiny_model(Path(folder), "qwen2", max_position_embeddings=2 * MAX_TOKENS)
        with _llm(folder) as llm:
            slot_bytes = llm.engine.arena.layout.slot_bytes
        served: dict[Eviction, Served] = {}
        for policy in POLICIES:
            memory = f"{memory_blocks * slot_bytes // 1024}KiB"
            server = stack.enter_context(cache_server("--eviction", policy, memory=memory))
            served[policy] = Served(stack.enter_context(_llm(folder, cache_server=server.unix, always_load=True)))
            served[policy].llm.generate([[1] * 8], _ONE_TOKEN, progress=False)  # less than a block: nothing is stored
        started_at = time.perf_counter()
        for number, request in enumerate(requests):
            prompt = _prompt(request)
            for policy in POLICIES[:: -1 if number % 2 else 1]:
                served[policy].ask(prompt, started_at)
        return served


@contextlib.contextmanager
def _llm(folder: str, **settings: object) -> Iterator[LLM]:
    fixed = {"device": "cpu", "block_manager": "disable_prefix_caching", "canary_share": 0.0}
    with LLM(folder, **fixed, kv_cache_space=64 << 20, max_model_len=2 * MAX_TOKENS, **settings) as llm:
        yield llm


def _figures(
    requests: Sequence[TracedRequest], memory_blocks: int, served: dict[Eviction, Served], result: Result
) -> dict[str, float]:
    costs = Costs(shape_of("qwen2.5-0.5b"), GPUS["l4"], 1e9)
    figures: dict[str, float] = {}
    points_off = []
    for policy, one in served.items():
        come = [dataclasses.replace(request, arrived_s=at) for request, at in zip(requests, one.arrived_s, strict=True)]
        simulated = replay_tiers(come, TierSettings(memory_blocks, eviction=policy), costs, BLOCK_TOKENS)
        hit_rate = one.hit_tokens / sum(request.input_length for request in requests)
        points_off.append(100 * abs(hit_rate - simulated.hit_rate))
        figures |= {f"hits_{policy}": hit_rate, f"simulated_hits_{policy}": simulated.hit_rate}
        result.rows.append(
            {
                "policy": policy,
                "hits": f"{hit_rate:.4f}",
                "simulated": f"{simulated.hit_rate:.4f}",
                "TTFT mean, ms": round(1000 * statistics.mean(one.ttfts_s), 1),
                "TTFT p90, ms": round(1000 * share_of_sorted(sorted(one.ttfts_s), 0.9), 1),
            }
        )
    lru, ours = (sorted(served[policy].ttfts_s) for policy in POLICIES)
    figures["mean_ttft_over_lru"] = statistics.mean(ours) / statistics.mean(lru)
    figures["p90_ttft_over_lru"] = share_of_sorted(ours, 0.9) / share_of_sorted(lru, 0.9)
    return {**figures, "points_off": max(points_off)}


if __name__ == "__main__":
    sys.exit(main())
