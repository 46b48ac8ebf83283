"""python -m benchmarks.peers: store and read back random blocks through every peer, and print a table."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time

import numpy as np

from benchmarks.peers import Peer, PeerUnavailable, all_peers


def views(buffer: np.ndarray[tuple[int], np.dtype[np.uint8]], block_bytes: int) -> list[memoryview]:
    """The buffer as one memoryview per block."""
    whole = buffer.data
    return [whole[start : start + block_bytes] for start in range(0, buffer.nbytes, block_bytes)]


def measure(peer: Peer, blocks: int, block_bytes: int, repeats: int) -> tuple[float, float]:
    """Median set and get rates in GB/s over the repeats, after one round that is checked but not counted."""
    random = np.random.default_rng()
    source = np.zeros(blocks * block_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    from_blocks, into_blocks = views(source, block_bytes), views(target, block_bytes)
    keys = [b"block-%08d" % index for index in range(blocks)]
    set_rates: list[float] = []
    get_rates: list[float] = []
    for round_number in range(repeats + 1):
        source[:] = np.frombuffer(random.bytes(source.nbytes), dtype=np.uint8)
        if round_number:
            peer.drop(keys)
        started = time.perf_counter()
        peer.set(keys, from_blocks)
        set_seconds = time.perf_counter() - started
        np.bitwise_not(source, out=target)  # poison: every byte is wrong until the peer writes it
        started = time.perf_counter()
        peer.get(keys, into_blocks)
        get_seconds = time.perf_counter() - started
        if not np.array_equal(source, target):
            raise ValueError(f"{peer.name} returned wrong bytes")
        if round_number:
            set_rates.append(source.nbytes / set_seconds / 1e9)
            get_rates.append(source.nbytes / get_seconds / 1e9)
    return statistics.median(set_rates), statistics.median(get_rates)


def main() -> int:
    """Run every peer in turn; 1 when one that did start failed or returned wrong bytes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--block-bytes", type=int, default=917504)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="only the peers whose name contains this")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the peers are closed then too
    failures = 0
    print(f"{options.blocks} blocks of {options.block_bytes} bytes, median of {options.repeats}")
    print(f"{'peer':<28}{'transport':<11}{'set GB/s':>9}{'get GB/s':>10}")
    for peer in all_peers():
        if options.only not in peer.name:
            continue
        start = f"{peer.name:<28}{peer.transport:<11}"
        try:
            peer.open(options.block_bytes, options.blocks)
            rates = measure(peer, options.blocks, options.block_bytes, options.repeats)
            print(f"{start}{rates[0]:>9.2f}{rates[1]:>10.2f}", flush=True)
        except PeerUnavailable as reason:
            print(f"{start} {reason}", flush=True)
        except Exception as error:
            failures += 1
            print(f"{start} failed: {type(error).__name__}: {error}", flush=True)
        finally:
            peer.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
