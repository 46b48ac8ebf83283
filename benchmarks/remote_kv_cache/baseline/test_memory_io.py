"""How fast 512 blocks move inside one process: the ways of the documents the project comes from, and ours.

    python -m benchmarks.remote_kv_cache.baseline.test_memory_io [--quick] [--json FILE]

Blocks are copied between two caches, from random block ids to random block ids; "adjacent" rows copy a run of
neighbours, which is what `reserve` hands out. l2l is layer-major memory: one copy per layer per block. b2b is
block-major. index_copy_ is torch's and is measured if torch is installed. With a GPU, swap in and swap out are the
engine's copies of as many scattered blocks between it and host memory (`offloading_KV_cache.baseline.test_swap` has
more of them). Rows of the result are seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Contender, Result, console, parse_options, print_table, race
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.blocks.layout import KvLayout
from kvtier.memory.copying import copy_blocks

Cache = npt.NDArray[np.uint16]


def main() -> None:
    options = parse_options(__doc__ or "", tuple(SHAPES))
    result = Result(
        "remote_kv_cache.baseline.test_memory_io",
        {"blocks": NUM_BLOCKS, "repeats": options.repeats, "shapes": options.shapes, "quick": options.quick},
    )
    rates: list[dict[str, object]] = []
    for shape in options.shapes:
        console.print(f"{shape}: {NUM_BLOCKS} blocks, {options.repeats} repeats")
        seconds = {**measure(SHAPES[shape], options.repeats), **measure_swap(SHAPES[shape], options.repeats)}
        nbytes = NUM_BLOCKS * SHAPES[shape].block_bytes
        result.rows.append({"shape": shape, **{name: round(value, 5) for name, value in seconds.items()}})
        rates.append({"shape": shape, **{name: f"{nbytes / value / 1e9:.2f}" for name, value in seconds.items()}})
        best = min(seconds["memcpy, one"], seconds["memcpy, by block"])
        result.figures[f"copy_adjacent_x_{shape}"] = seconds["kvtier copy, adjacent"] / best
    print_table("seconds, medians", result.rows)
    print_table("GB/s, medians", rates)
    result.write(options.json)


def measure(layout: KvLayout, repeats: int) -> dict[str, float]:
    """Median seconds by method. The caches hold the blocks once, so every id is used."""
    source: Cache = np.random.default_rng(4).integers(0, 1 << 16, (NUM_BLOCKS, *layout.shape), np.uint16)
    target: Cache = np.zeros_like(source)
    dice = random.Random(5)
    froms, tos = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))
    dice.shuffle(froms)
    dice.shuffle(tos)
    by_layer = (layout.layers, NUM_BLOCKS, *layout.shape[1:])
    source_layers, target_layers = source.reshape(by_layer), target.reshape(by_layer)
    base_to, base_from, nbytes = target.ctypes.data, source.ctypes.data, layout.block_bytes
    ids = range(NUM_BLOCKS)

    def l2l() -> None:
        for layer in range(layout.layers):
            for to, origin in zip(tos, froms, strict=True):
                target_layers[layer, to] = source_layers[layer, origin]

    def b2b() -> None:
        for to, origin in zip(tos, froms, strict=True):
            target[to, ...] = source[origin, ...]

    def fancy() -> None:
        target[tos] = source[froms]

    def memcpy_blocks() -> None:
        for to, origin in zip(tos, froms, strict=True):
            ctypes.memmove(base_to + to * nbytes, base_from + origin * nbytes, nbytes)

    def ours(tos: list[int], froms: list[int]) -> Callable[[], None]:
        return lambda: copy_blocks(
            [base_to + to * nbytes for to in tos], [base_from + f * nbytes for f in froms], nbytes
        )

    def check() -> None:
        if not (target[tos[0]] == source[froms[0]]).all() or not (target[tos[-1]] == source[froms[-1]]).all():
            raise AssertionError("a copy left other bytes")

    def clear() -> None:
        target.fill(0)

    contenders = [
        Contender("memcpy, one", lambda: ctypes.memmove(base_to, base_from, source.nbytes)),
        Contender("memcpy, by block", memcpy_blocks, clear, check),
        Contender("l2l naive", l2l, clear),
        Contender("b2b naive", b2b, clear, check),
        Contender("b2b fancy index", fancy, clear, check),
        Contender("kvtier copy, scattered", ours(tos, froms), clear, check),
        Contender("kvtier copy, adjacent", ours(list(ids), list(ids)), clear),
    ]
    if importlib.util.find_spec("torch") is not None:
        contenders.append(Contender("b2b index_copy_", _index_copy(source, target, froms, tos), clear, check))
    return race(contenders, repeats)


def measure_swap(layout: KvLayout, repeats: int) -> dict[str, float]:
    """Median seconds of the engine's copies to and from a GPU; nothing without one."""
    if importlib.util.find_spec("torch") is None or not importlib.import_module("torch").cuda.is_available():
        return {}
    test_swap = importlib.import_module("benchmarks.offloading_KV_cache.baseline.test_swap")
    with contextlib.ExitStack() as stack:
        stand = test_swap.Stand(layout, stack, test_swap.DEVICE, has_server=False)
        copier = stack.enter_context(stand.copier(1))
        ins, outs = race(stand.ways_in(copier, 1), repeats), race(stand.ways_out(copier), repeats)
    return {"swap in": list(ins.values())[-1], "swap out": list(outs.values())[-1]}


def _index_copy(source: Cache, target: Cache, froms: list[int], tos: list[int]) -> Callable[[], object]:
    torch = importlib.import_module("torch")
    source_tensor = torch.from_numpy(source.view(np.int16))
    target_tensor = torch.from_numpy(target.view(np.int16))
    from_ids, to_ids = torch.tensor(froms), torch.tensor(tos)
    return lambda: target_tensor.index_copy_(0, to_ids, source_tensor[from_ids])


if __name__ == "__main__":
    main()
