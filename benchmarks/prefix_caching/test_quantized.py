"""Quantised weights: prompts and tokens per second with fp8 and with GPTQ-Int4, over the same model's plain weights.

    python -m benchmarks.prefix_caching.test_quantized [--quick] [--kinds plain fp8 gptq] [--json FILE]

An engine of each kind, all with random weights of one shape, side by side on the device and in turns: prompts of 8192
tokens with one token out (`prefill`), and answers to prompts of 1024 tokens that are cached already, one request at a
time and 16 (`decode`). Ratios are medians over the turns: how many times as fast as plain.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import Result, console, print_table
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Variant, clock_of
from benchmarks.prefix_caching.options import conclude, is_h200, make_parser, parse
from benchmarks.tier_stand import chosen, kv_bytes, settings_of

PLAIN, FP8, GPTQ = "plain", "fp8", "gptq"
KINDS = (PLAIN, FP8, GPTQ)
H200_BARS = {
    FP8: {"fp8_prefill_x": ">= 1.4", "fp8_decode_x": ">= 1.5"},
    GPTQ: {"gptq_decode_x": ">= 1"},
}
SETTINGS: Mapping[str, Mapping[str, object]] = {PLAIN: {}, FP8: {"quantization": "fp8"}, GPTQ: {}}
GPTQ_FIELDS = {"bits": 4, "desc_act": False, "group_size": 128, "quant_method": "gptq", "sym": True}
"""As in the published GPTQ-Int4 checkpoints of these models."""

COMPUTING, CACHED = Variant("naive"), Variant("prefix_caching")
PREFILL = "prefill"


@dataclass(frozen=True)
class Size:
    """How much is measured. `batches` are numbers of requests that decode at a time."""

    prompts: int
    input_tokens: int
    context_tokens: int
    output_tokens: int
    batches: tuple[int, ...]
    repeats: int
    kinds: tuple[str, ...]
    max_num_requests: int
    max_num_batched_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all; plain is always measured")
    parser.add_argument("--input-tokens", type=int, help="how long a prompt is that is computed")
    parser.add_argument("--output-tokens", type=int, help="how long an answer is")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("prefix_caching.test_quantized", settings_of(arguments, size, cpu_clock="CPU time of the process"))
    bars: dict[str, str] = {}
    if is_h200(arguments.device):
        for kind in size.kinds:
            bars |= H200_BARS.get(kind, {})
    return conclude(result, arguments, bars, lambda: measure(arguments, size, result))


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    with contextlib.ExitStack() as stack:
        stands: dict[str, EngineStand] = {}
        for kind in size.kinds:
            started_at = time.perf_counter()
            stands[kind] = stack.enter_context(_open(arguments, size, kind))
            console.print(f"{kind}: ready after {time.perf_counter() - started_at:.0f} s")
            weights_bytes = stands[kind].llm.engine.loaded.weights_bytes
            result.settings = {**result.settings, f"weights_bytes_{kind}": weights_bytes}
        maker = PromptMaker(stands[PLAIN].vocab_size)
        measured = {PREFILL: _prefill(stands, maker, size)}
        for batch in size.batches:
            measured[f"decode, batch {batch}"] = _decode(stands, maker, size, batch)
    for name, seconds in measured.items():
        _report(name, seconds, size, result)
    print_table(f"{arguments.model_shape}, medians of {size.repeats} turns", result.rows)


def _prefill(stands: Mapping[str, EngineStand], maker: PromptMaker, size: Size) -> dict[str, list[float]]:
    """Seconds for all prompts."""
    seconds: dict[str, list[float]] = {kind: [] for kind in stands}
    for stand in stands.values():
        stand.use(COMPUTING)
    for repeat in range(size.repeats + 1):
        prompts = maker.make(size.prompts, size.input_tokens)
        for kind in _order(stands, repeat):
            done = stands[kind].run(prompts, 1)
            if repeat:
                seconds[kind].append(done.seconds)
    return seconds


def _decode(stands: Mapping[str, EngineStand], maker: PromptMaker, size: Size, batch: int) -> dict[str, list[float]]:
    """Seconds per token of the median request."""
    seconds: dict[str, list[float]] = {kind: [] for kind in stands}
    prompts = maker.make(batch, size.context_tokens)
    for stand in stands.values():
        stand.use(CACHED)
        stand.run(prompts, 2)
    for repeat in range(size.repeats + 1):
        for kind in _order(stands, repeat):
            done = stands[kind].run(prompts, size.output_tokens)
            if repeat:
                seconds[kind].append(statistics.median(answer.time_per_output_token_s for answer in done.answers))
    return seconds


def _order(stands: Mapping[str, EngineStand], repeat: int) -> list[str]:
    kinds = list(stands)
    return kinds if repeat % 2 == 0 else kinds[::-1]


def _report(name: str, seconds: Mapping[str, list[float]], size: Size, result: Result) -> None:
    for kind, values in seconds.items():
        ratios = [plain / own for plain, own in zip(seconds[PLAIN], values, strict=True)]
        ratio = statistics.median(ratios)
        row: dict[str, object] = {"what": name, "weights": kind, "ms": round(1000 * statistics.median(values), 3)}
        if name == PREFILL:
            row["tokens/s"] = round(size.prompts * size.input_tokens / statistics.median(values))
        row |= {"times plain": round(ratio, 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}
        console.print(", ".join(f"{key} {value}" for key, value in row.items()))
        result.rows.append(row)
        if kind != PLAIN:
            figure = {PREFILL: "prefill_x", "decode, batch 1": "decode_x"}.get(name)
            result.figures[f"{kind}_{figure or name.replace(', batch ', '_x_')}"] = ratio


def _open(arguments: argparse.Namespace, size: Size, kind: str) -> EngineStand:
    needed = max(size.prompts * size.input_tokens, max(size.batches) * (size.context_tokens + size.output_tokens))
    return EngineStand(
        arguments.model_shape,
        arguments.device,
        clock=clock_of(arguments.device),
        model_fields={"quantization_config": GPTQ_FIELDS} if kind == GPTQ else {},
        kv_cache_space=kv_bytes(arguments, 2 * needed + 64 * max(size.prompts, *size.batches)),
        max_model_len=max(size.input_tokens, size.context_tokens + size.output_tokens) + 32,
        max_num_requests=size.max_num_requests,
        max_num_batched_tokens=size.max_num_batched_tokens,
        **SETTINGS[kind],
    )


def _size(arguments: argparse.Namespace) -> Size:
    quick = arguments.quick
    if arguments.device == "cuda":
        size = Size(
            prompts=4,
            input_tokens=8192,
            context_tokens=1024,
            output_tokens=128,
            batches=(1, 16),
            repeats=5 if quick else 9,
            kinds=KINDS,
            max_num_requests=16,
            max_num_batched_tokens=8192,
        )
    else:
        size = Size(
            prompts=2,
            input_tokens=256,
            context_tokens=64,
            output_tokens=16,
            batches=(1, 4),
            repeats=3,
            kinds=KINDS,
            max_num_requests=4,
            max_num_batched_tokens=256,
        )
    names = ("prompts", "input_tokens", "output_tokens", "repeats", "kinds", "max_num_requests")
    given = chosen(arguments, *names, "max_num_batched_tokens")
    if "kinds" in given:
        given["kinds"] = tuple(kind for kind in KINDS if kind == PLAIN or kind in given["kinds"])
    return Size(**{**vars(size), **given})


if __name__ == "__main__":
    sys.exit(main())
