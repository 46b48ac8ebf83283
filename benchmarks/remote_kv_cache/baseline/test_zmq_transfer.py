"""The same 512 blocks over ZeroMQ: tcp, ipc and inproc, as the documents the project comes from did it.

    python -m benchmarks.remote_kv_cache.baseline.test_zmq_transfer [--quick] [--json FILE]

This is the baseline to beat, in multiples of one memcpy of the same bytes in the same run. Needs pyzmq (see
benchmarks/peers/README.md).
"""

from __future__ import annotations

import ctypes
import sys

from benchmarks.harness import BlockMemory, Contender, Result, console, parse_options, print_table, race
from benchmarks.peers import Peer, PeerUnavailable, all_peers
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.memory.copying import address_of


def main() -> int:
    options = parse_options(__doc__ or "", tuple(SHAPES))
    result = Result(
        "remote_kv_cache.baseline.test_zmq_transfer",
        {"blocks": NUM_BLOCKS, "repeats": options.repeats, "shapes": options.shapes, "quick": options.quick},
    )
    for shape in options.shapes:
        console.print(f"{shape}: {NUM_BLOCKS} blocks, {options.repeats} repeats")
        source = BlockMemory(NUM_BLOCKS, SHAPES[shape].block_bytes, seed=6)
        target = BlockMemory(NUM_BLOCKS, SHAPES[shape].block_bytes)
        for peer in (peer for peer in all_peers() if peer.name.startswith("zeromq")):
            try:
                seconds = measure(peer, source, target, options.repeats)
            except PeerUnavailable as reason:
                console.print(f"{reason} `make peers` installs it.")
                return 1
            row: dict[str, object] = {"shape": shape, "what": peer.name, "memcpy s": round(seconds["memcpy"], 5)}
            for name in ("set", "get"):
                times = seconds[name] / seconds["memcpy"]
                row[f"{name} s"] = round(seconds[name], 5)
                row[f"{name} GB/s"] = f"{source.nbytes / seconds[name] / 1e9:.2f}"
                row[f"{name} x memcpy"] = f"{times:.2f}"
                figure = f"{peer.name} {name}_x".replace(" ", "_").replace("=", "_")
                result.figures[figure] = max(result.figures.get(figure, 0.0), times)
            result.rows.append(row)
    print_table("ZeroMQ against one memcpy, medians", result.rows)
    result.write(options.json)
    return 0


def measure(peer: Peer, source: BlockMemory, target: BlockMemory, repeats: int) -> dict[str, float]:
    """Median seconds of a memcpy, a set and a get, taking turns."""
    keys = [f"block-{number:06d}".encode() for number in range(NUM_BLOCKS)]
    try:
        peer.open(len(source.blocks[0]), NUM_BLOCKS)
        return race(
            [
                Contender(
                    "memcpy", lambda: ctypes.memmove(address_of(target.view), address_of(source.view), source.nbytes)
                ),
                Contender("set", lambda: peer.set(keys, source.blocks), lambda: peer.drop(keys)),
                Contender("get", lambda: peer.get(keys, target.blocks), target.poison, lambda: target.expect(source)),
            ],
            repeats,
        )
    finally:
        peer.close()


if __name__ == "__main__":
    sys.exit(main())
