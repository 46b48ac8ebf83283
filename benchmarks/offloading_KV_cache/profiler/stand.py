"""The engine that is profiled, and the options of both profiles."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.offloading_KV_cache.profiler.tracing import add_trace_option
from benchmarks.prefix_caching.engine_stand import EngineStand
from benchmarks.prefix_caching.options import make_parser
from benchmarks.tier_stand import chosen, host_tiers, kv_bytes, open_stand

GPU_SHAPE = "Qwen2.5-3B"


@dataclass(frozen=True)
class Size:
    prompts: int
    input_tokens: int
    output_tokens: int
    max_num_batched_tokens: int


def make_profile_parser(description: str, name: str) -> argparse.ArgumentParser:
    parser = make_parser(description, GPU_SHAPE)
    parser.add_argument("--input-tokens", type=int, help="how long a prompt is")
    add_trace_option(parser, name)
    return parser


def size_of(arguments: argparse.Namespace) -> Size:
    if arguments.device == "cuda":
        size = Size(prompts=4, input_tokens=2048, output_tokens=16, max_num_batched_tokens=1024)
    else:
        size = Size(
            prompts=4, input_tokens=256 if arguments.quick else 1024, output_tokens=4, max_num_batched_tokens=128
        )
    return Size(**{**vars(size), **chosen(arguments, "prompts", "input_tokens", "max_num_batched_tokens")})


@contextlib.contextmanager
def open_profiled(arguments: argparse.Namespace, size: Size) -> Iterator[EngineStand]:
    run_tokens = size.prompts * (size.input_tokens + size.output_tokens + 16)
    with (
        host_tiers(kv_bytes(arguments, 3 * run_tokens)) as tiers,
        open_stand(
            arguments,
            tiers,
            kv_tokens=2 * run_tokens,
            max_model_len=size.input_tokens + size.output_tokens + 32,
            max_num_requests=size.prompts,
            max_num_batched_tokens=size.max_num_batched_tokens,
            always_load=True,
        ) as stand,
    ):
        yield stand
