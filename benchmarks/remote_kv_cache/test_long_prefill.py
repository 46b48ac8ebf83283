"""Long prompts over six rounds, with a new engine from the fourth on: which tier serves them, and how fast.

    python -m benchmarks.remote_kv_cache.test_long_prefill [--quick] [--tcp] [--json FILE] [--plot FILE.png]

10 prompts x 10240 random tokens, all submitted at once, 1024 tokens a step, N tokens out. Round 1 computes them, into a
cache server; 2 and 3 repeat them. Then the engine is closed and another one started: round 4 finds the prompts in the
server, rounds 5 and 6 wherever the engine keeps them by then. With the device's cache on, and off. `--swap-space` puts
host memory between the device and the server. Less on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import Result, console, print_figures, print_table
from benchmarks.line_plot import draw_lines
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Round, Variant
from benchmarks.prefix_caching.options import parse
from benchmarks.tier_stand import (
    BELOW,
    DEVICE_OFF,
    DEVICE_ON,
    Tiers,
    add_server_options,
    chosen,
    expect_hits,
    expect_tokens,
    full_share,
    kv_bytes,
    make_tier_parser,
    open_stand,
    server_tiers,
    settings_of,
    shown_shares,
    warm_up,
)
from kvtier.engine.schedule.block_manager import BlockManagerName

GPU_SHAPE = "Qwen2.5-7B"
OUTPUTS = (2, 4, 8, 16, 32, 64, 128)
ROUNDS = (1, 2, 3, 4, 5, 6)
RESTART_BEFORE = 4
MANAGERS: tuple[BlockManagerName, ...] = (DEVICE_ON, DEVICE_OFF)


@dataclass(frozen=True)
class Size:
    prompts: int
    input_tokens: int
    outputs: tuple[int, ...]
    managers: tuple[BlockManagerName, ...]
    max_num_requests: int
    max_num_batched_tokens: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    add_server_options(parser)
    parser.add_argument("--outputs", type=int, nargs="+", help="values of N")
    parser.add_argument("--managers", nargs="+", choices=MANAGERS, help="device cache on, off, or both")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("remote_kv_cache.test_long_prefill", settings_of(arguments, size))
    try:
        measure(arguments, size, result)
        print_figures(result.figures, {})
    finally:  # keep the results from before a failure
        result.write(arguments.json)
    if arguments.plot is not None:
        _draw(arguments, size, result)


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    run_tokens = sum(size.prompts * (size.input_tokens + count + 16) for count in size.outputs)
    nbytes = kv_bytes(arguments, run_tokens + 2 * size.prompts * (size.input_tokens + 16))
    for manager in size.managers:
        rounds: dict[tuple[int, int], Round] = {}
        with server_tiers(nbytes, is_tcp=arguments.tcp, swap_space=arguments.swap_space) as tiers:
            prompts: dict[int, list[list[int]]] = {}
            for these in (ROUNDS[: RESTART_BEFORE - 1], ROUNDS[RESTART_BEFORE - 1 :]):
                with _open(arguments, size, tiers, run_tokens) as stand:
                    result.settings = {**result.settings, "tiers": tiers.name, **stand.settings()}
                    maker = PromptMaker(stand.vocab_size, seed=these[0])
                    warm_up(stand, maker, size.prompts, size.input_tokens)
                    stand.use(Variant(manager))
                    for count in size.outputs:
                        if count not in prompts:
                            prompts[count] = maker.make(size.prompts, size.input_tokens)
                        for number in these:
                            done = stand.run(prompts[count], count)
                            stand.settle()
                            rounds[number, count] = done
                            _check(arguments, size, manager, number, done, rounds[1, count])
        _report(size, manager, rounds, result)
    print_table(f"QPS, {size.prompts} prompts x {size.input_tokens} tokens, by tokens out", result.rows)


def _check(
    arguments: argparse.Namespace, size: Size, manager: BlockManagerName, number: int, done: Round, first: Round
) -> None:
    what = f"device cache {_on_off(manager)}, round {number}"
    if number == 1:
        expect_hits(done, (), 0.0, what)
        return
    is_on_device = manager == DEVICE_ON and number != RESTART_BEFORE
    expect_hits(done, ("device",) if is_on_device else BELOW, full_share(size.input_tokens), what)
    expect_tokens(done, first, arguments.device, what)


def _report(size: Size, manager: BlockManagerName, rounds: dict[tuple[int, int], Round], result: Result) -> None:
    for number in ROUNDS:
        done = [rounds[number, count] for count in size.outputs]
        row: dict[str, object] = {
            "device cache": _on_off(manager),
            "round": f"{number}{', restarted' if number == RESTART_BEFORE else ''}",
            "from": shown_shares(done[0].shares),
        }
        row |= {f"N={count}": round(one.qps, 3) for count, one in zip(size.outputs, done, strict=True)}
        console.print(", ".join(f"{name} {value}" for name, value in row.items()))
        result.rows.append(row)
    for count in size.outputs:
        ratio = rounds[RESTART_BEFORE, count].qps / rounds[1, count].qps
        result.figures[f"server_hit_over_cold_{_on_off(manager)}_n{count}"] = ratio


def _on_off(manager: BlockManagerName) -> str:
    return "on" if manager == DEVICE_ON else "off"


def _open(arguments: argparse.Namespace, size: Size, tiers: Tiers, run_tokens: int) -> EngineStand:
    return open_stand(
        arguments,
        tiers,
        kv_tokens=run_tokens,
        max_model_len=size.input_tokens + max(size.outputs) + 32,
        max_num_requests=size.max_num_requests,
        max_num_batched_tokens=size.max_num_batched_tokens,
    )


def _draw(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    lines = {
        f"device cache {row['device cache']}, round {row['round']}: {row['from']}": {
            float(count): float(str(row[f"N={count}"])) for count in size.outputs
        }
        for row in result.rows
        if row["round"] != "6"
    }
    draw_lines(
        lines,
        arguments.plot,
        title=f"{arguments.model_shape} on {result.settings['device']}: {size.prompts} prompts x {size.input_tokens}, "
        f"{result.settings['tiers']}",
        x_label="tokens out",
        y_label="requests per second",
        has_log_x=True,
        style_of=lambda name: {"linestyle": "--" if "cache off" in name else "-"},
    )


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=10,
            input_tokens=10240,
            outputs=(2, 32) if quick else OUTPUTS,
            managers=MANAGERS,
            max_num_requests=128,
            max_num_batched_tokens=1024,
        )
    else:
        size = Size(
            prompts=2 if quick else 4,
            input_tokens=1024 if quick else 2048,
            outputs=(2, 8) if quick else (2, 8, 32),
            managers=MANAGERS,
            max_num_requests=16,
            max_num_batched_tokens=512,
        )
    names = ("prompts", "input_tokens", "outputs", "managers", "max_num_requests", "max_num_batched_tokens")
    return Size(**{**vars(size), **chosen(arguments, *names)})


if __name__ == "__main__":
    main()
