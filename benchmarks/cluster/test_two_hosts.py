"""Two engines on two cache servers on two hosts over one Valkey cluster: first tokens by hits in it and by computing.

    python -m benchmarks.cluster.test_two_hosts [--quick] [--json FILE]

The hosts are network namespaces of this machine, joined by a bridge: needs root and `ip`. Each has a cache server, and
a node of the cluster; a third host has only a node. Prompts are computed on the first host; then the second host gets
each of them for the first time, with one output token, beside an engine without tiers. The device's own cache is off.
`cluster_of_compute` is the worst ratio of the two: less than 1 if the cluster is faster.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.harness import Result, console, finish, make_parser, print_table
from benchmarks.model_configs import SMALL_SHAPE, model_folder
from benchmarks.prefix_caching.engine_stand import PromptMaker
from kvtier import LLM, SamplingParams
from kvtier.testing.servers import cache_server
from tests.support.namespaces import Host, network
from tests.support.valkey import ValkeyCluster, valkey_cluster

BARS = {"cluster_of_compute": "<= 1", "loaded_of_prompt": ">= 0.9"}
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
_PATIENCE_S = 300.0
_SETTINGS = {
    "load_format": "dummy",
    "device": "cpu",
    "kv_cache_space": 512 << 20,
    "block_manager": "disable_prefix_caching",
    "max_num_requests": 8,
}


def main() -> int:
    parser = make_parser(__doc__ or "")
    arguments = parser.parse_args()
    lengths = (256,) if arguments.quick else (256, 1024, 2048)
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    torch.set_num_threads(1)
    result = Result("cluster.test_two_hosts", {"model": SMALL_SHAPE, "lengths": list(lengths), "repeats": repeats})
    with network(3) as joined, valkey_cluster(3, hosts=joined.hosts) as cluster:
        measure(cluster, joined.hosts[:2], lengths, repeats, result)
    return finish(result, BARS, arguments.json)


def measure(
    cluster: ValkeyCluster, hosts: Sequence[Host], lengths: Sequence[int], repeats: int, result: Result
) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(model_folder(SMALL_SHAPE))
        servers = [stack.enter_context(engine_on(host, cluster, folder)) for host in hosts]
        compute = stack.enter_context(LLM(folder, **_SETTINGS))
        first, second = servers
        prompts = PromptMaker(compute.engine.loaded.config.vocab_size, seed=11)
        for llm in (first, second, compute):  # the first request is slow
            ask(llm, prompts.make(1, max(lengths))[0])
        rows: list[dict[str, object]] = []
        shares, ratios = [], []
        for length in lengths:
            asked = prompts.make(repeats, length)
            for prompt in asked:
                ask(first, prompt)
            if not first.engine.transfer.settle(_PATIENCE_S):
                raise RuntimeError("the prompts are not stored in time")
            wait_for_blocks(cluster)
            times: dict[str, list[float]] = {"compute": [], "cluster": []}
            for prompt in asked:
                seconds, expected, _ = ask(compute, prompt)
                times["compute"].append(seconds)
                seconds, answer, num_loaded = ask(second, prompt)
                times["cluster"].append(seconds)
                shares.append(num_loaded / length)
                if answer != expected:
                    raise AssertionError("another answer from the cluster")
            medians = {name: statistics.median(values) for name, values in times.items()}
            ratios.append(medians["cluster"] / medians["compute"])
            rows.append({"tokens": length, **{f"{name}, ms": f"{1000 * value:.1f}" for name, value in medians.items()}})
    print_table("time to the first token, medians", rows)
    result.rows += rows
    result.figures["cluster_of_compute"] = max(ratios)
    result.figures["loaded_of_prompt"] = statistics.median(shares)


@contextlib.contextmanager
def engine_on(host: Host, cluster: ValkeyCluster, folder: str) -> Iterator[LLM]:
    """An engine above a cache server on `host`. It talks only to the server, so it need not run on that host."""
    nodes = ",".join(f"tcp://{seed}" for seed in cluster.seeds)
    with contextlib.ExitStack() as stack:
        with host.entered():
            flags = ("--cluster", nodes, "--cluster-plaintext")
            server = stack.enter_context(cache_server(*flags, memory=str(512 << 20)))
        console.print(f"a cache server on {host.name} ({host.address})")
        yield stack.enter_context(LLM(folder, cache_server=server.unix, always_load=True, **_SETTINGS))


def ask(llm: LLM, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer, and how many tokens came from the cluster."""
    started_at = time.perf_counter()
    (output,) = llm.generate([prompt], _ONE_TOKEN, progress=False)
    seconds = time.perf_counter() - started_at
    completion = output.outputs[0]
    return seconds, completion.token_ids, completion.cached_tokens.get("cluster", 0)


def wait_for_blocks(cluster: ValkeyCluster) -> None:
    """Wait until no blocks are left to write."""
    before = -1
    while (now := sum(int(str(cluster.call(node, b"DBSIZE"))) for node in cluster.primaries)) != before:
        before = now
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
