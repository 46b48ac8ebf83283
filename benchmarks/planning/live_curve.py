"""The hit curve that a cache server keeps of its traffic, against exact LRU, and the cost of keeping it.

    python -m benchmarks.planning.live_curve [--quick] [--json FILE] [TRACE ...]

Each TRACE (docs/planning.md) is replayed by arrival through the record of a server and through exact LRU: hits are the
leading resident blocks, at most the prompt's tokens, over all prompt tokens; a prompt is used from its end on. Sizes
are 500 blocks, 1,000, ... 64,000. Without a trace the traffic is made up: sessions that grow behind shared beginnings.
`curve_points_off` is the largest difference in points at any size of any trace, over three choices of hashes, and
`asked_points_off` that of shares of full blocks, which is what a server sees of a prompt. Ends with status 1 when a
figure misses its bar.

The record is kept after a request was answered: no client waits for it. `note_us` is its time for a prompt of 512
blocks, `match_us` that of a client that matches as many on a server of this host.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Result, finish, make_parser, print_table, read_options
from kvtier import connect
from kvtier.blocks.hashing import HASH_BYTES
from kvtier.blocks.layout import SLOT_ALIGN_BYTES, KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.cacheserver.reuse_record import RecordedUse, ReuseRecord
from kvtier.planning.reuse import Use, uses_of
from kvtier.simulate.trace import BLOCK_TOKENS, TracedRequest, by_arrival, read_traces
from kvtier.testing.servers import cache_server

BARS = {"curve_points_off": "<= 3"}
SIZES = [500 << doubling for doubling in range(8)]
NUM_SEEDS = 3
ANY_SIZE = 1 << 40
COST_BLOCKS = 512
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=32, dtype="float32", block_tokens=16)


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    options, arguments = read_options(parser, ())
    traces = {path.name: by_arrival(read_traces(path)) for path in arguments.traces}
    traces = traces or {"made up": made_up(100 if options.quick else 400)}
    result = Result("planning.live_curve", {"sizes": SIZES, "seeds": NUM_SEEDS, "block_tokens": BLOCK_TOKENS})
    off = {"curve_points_off": 0.0, "asked_points_off": 0.0}
    for name, requests in traces.items():
        uses = uses_of(requests)
        records = [record_of(requests, seed) for seed in range(NUM_SEEDS)]
        for num_blocks in SIZES:
            exact, exact_asked = shares_of(uses, num_blocks)
            live = [share_at(record, num_blocks * SLOT_ALIGN_BYTES) for record in records]
            worst = max(live, key=lambda share: abs(share - exact))
            off["curve_points_off"] = max(off["curve_points_off"], 100 * abs(worst - exact))
            off["asked_points_off"] = max(off["asked_points_off"], *(100 * abs(share - exact_asked) for share in live))
            result.rows.append(
                {
                    "trace": name,
                    "blocks": num_blocks,
                    "exact LRU": f"{exact:.3f}",
                    "live": f"{live[0]:.3f}",
                    "worst, points": f"{100 * (worst - exact):+.1f}",
                    "sampled": f"{records[0].sampled_share:.3f}",
                }
            )
    print_table("the live curve against exact LRU", result.rows)
    result.figures = {**off, "note_us": note_us(), "match_us": match_us(options.repeats)}
    return finish(result, BARS, options.json)


def made_up(num_sessions: int) -> list[TracedRequest]:
    """Sessions that grow turn by turn behind one of a few shared beginnings; the latest come back most."""
    rng = random.Random(1)
    prompts = [[*range(100 * beginning, 100 * beginning + 40)] for beginning in rng.choices(range(5), k=num_sessions)]
    next_block = 1000
    requests = []
    for number in range(20 * num_sessions):
        prompt = prompts[min(int(rng.expovariate(3 / num_sessions)), num_sessions - 1)]
        grown = rng.randrange(1, 12)
        prompt += range(next_block, next_block + grown)
        next_block += grown
        requests.append(TracedRequest(float(number), BLOCK_TOKENS * len(prompt), 0, tuple(prompt)))
    return requests


def record_of(requests: Sequence[TracedRequest], seed: int) -> RecordedUse:
    record = ReuseRecord(SLOT_ALIGN_BYTES, ANY_SIZE)
    hashes: dict[int, bytes] = {}
    for request in requests:
        for number in request.hashes:
            if number not in hashes:
                hashes[number] = hashlib.sha256(b"%d %d" % (seed, number)).digest()
        record.note_asked(b"".join(map(hashes.__getitem__, request.hashes)), 1, BLOCK_TOKENS)
    return record.read()


def shares_of(uses: Sequence[Use], num_blocks: int) -> tuple[float, float]:
    """The shares of prompt tokens, and of the tokens of blocks, each counted as full."""
    hits = [use.hit_blocks(num_blocks) for use in uses]
    hit_tokens = sum(min(hit * BLOCK_TOKENS, use.tokens) for hit, use in zip(hits, uses, strict=True))
    return hit_tokens / sum(use.tokens for use in uses), sum(hits) / sum(use.num_blocks for use in uses)


def share_at(use: RecordedUse, num_bytes: int) -> float:
    place = bisect.bisect_left(use.points, (num_bytes, 0.0))
    (size, share), (before, lower) = use.points[place], use.points[place - 1]
    return lower + (share - lower) * (num_bytes - before) / (size - before)


def note_us() -> float:
    """Once the record knows such prompts."""
    record = ReuseRecord(SLOT_ALIGN_BYTES, ANY_SIZE)
    prompts = [os.urandom(COST_BLOCKS * HASH_BYTES) for _ in range(100)]
    seconds = []
    for _ in range(20):
        for prompt in prompts:
            started_at = time.perf_counter()
            record.note_asked(prompt, 1, 16)
            seconds.append(time.perf_counter() - started_at)
    return 1e6 * statistics.median(seconds[len(prompts) :])


def match_us(repeats: int) -> float:
    fields = NamespaceFields(layout=LAYOUT, weights="benchmark")
    with cache_server() as server, connect(server.unix, layout=LAYOUT, namespace=fields) as client:
        hashes = client.hashes(range(16 * COST_BLOCKS))
        client.set(hashes, [bytes(LAYOUT.block_bytes)] * len(hashes))
        seconds = []
        for _ in range(100 * repeats):
            started_at = time.perf_counter()
            with client.match(hashes):
                seconds.append(time.perf_counter() - started_at)
    return 1e6 * statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
