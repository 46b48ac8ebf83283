"""Streams that follow a JSON schema: their tokens per second, over the same streams without.

    python -m benchmarks.structured.test_json_schema [--quick] [--json FILE]

One engine with random weights and a made-up vocabulary of the model's size; 32 streams decode at a time, greedily and
drawn at random. Rounds take turns: no stream with a schema, all of them with one, and half of them. Ratios are medians
over the turns: `json_schema_x` is all over none, greedily; `beside_json_schema_x` is for streams without a schema
beside as many with one. At the end, one more round of each, in no ratio, shows the host's time of a step by part.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Result, console, print_table
from benchmarks.model_configs import MODEL_CONFIGS, model_folder
from benchmarks.prefix_caching.engine_stand import PromptMaker
from benchmarks.prefix_caching.options import conclude, is_h200, make_parser, parse
from benchmarks.structured.step_parts import StepParts
from benchmarks.structured.vocabulary import make_tokenizer
from benchmarks.tier_stand import chosen, kv_bytes, settings_of
from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion
from kvtier.engine.grammar import Grammar

H200_BARS = {"json_schema_x": ">= 0.97", "beside_json_schema_x": ">= 0.97"}
_UNUSED_TOKENS = 400
"""Logits for which the tokenizer has no token, as real models have them."""

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_member": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 60},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "is_member", "tags", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _PERSON, "minItems": 10_000}
"""No answer reaches its end."""


@dataclass(frozen=True)
class Size:
    prompts: int
    input_tokens: int
    output_tokens: int
    repeats: int


@dataclass(frozen=True)
class Round:
    """Tokens per second of all streams, and milliseconds for a token of the median stream without a schema."""

    tokens_per_s: float
    free_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--input-tokens", type=int, help="how long a prompt is")
    parser.add_argument("--output-tokens", type=int, help="how long an answer is")
    arguments = parse(parser, argv)
    size = _size(arguments)
    result = Result("structured.test_json_schema", settings_of(arguments, size))
    bars = H200_BARS if is_h200(arguments.device) else {}
    return conclude(result, arguments, bars, lambda: measure(arguments, size, result))


def measure(arguments: argparse.Namespace, size: Size, result: Result) -> None:
    vocab_size = MODEL_CONFIGS[arguments.model_shape]["vocab_size"]
    assert isinstance(vocab_size, int)
    with model_folder(arguments.model_shape) as folder:
        make_tokenizer(vocab_size - _UNUSED_TOKENS).save_pretrained(folder)
        with _open(arguments, size, folder) as llm:
            prompts = PromptMaker(vocab_size).make(size.prompts, size.input_tokens)
            started_at = time.perf_counter()
            llm.engine.grammars.compile(_grammar())
            console.print(f"vocabulary and grammar: ready after {time.perf_counter() - started_at:.1f} s")
            for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
                _compare(llm, prompts, size, result, name, temperature)
            print_table(
                f"{arguments.model_shape}, {size.prompts} streams, medians of {size.repeats} turns", result.rows
            )
            for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
                rows = _host_parts(llm, prompts, size, temperature)
                print_table(f"{name}: the host's milliseconds of a step, and the 99th of 100", rows)
                result.rows += [{"sampling": name, **row} for row in rows]


def _compare(llm: LLM, prompts: list[list[int]], size: Size, result: Result, name: str, temperature: float) -> None:
    shares = {"none": 0, "all": size.prompts, "half": size.prompts // 2}
    rounds: dict[str, list[Round]] = {share: [] for share in shares}
    for repeat in range(size.repeats + 1):
        for share in sorted(shares, reverse=bool(repeat % 2)):
            done = _run(llm, prompts, size, shares[share], temperature)
            if repeat:
                rounds[share].append(done)
    for share, turns in rounds.items():
        ratios = [own.tokens_per_s / free.tokens_per_s for own, free in zip(turns, rounds["none"], strict=True)]
        result.rows.append(
            {
                "sampling": name,
                "with a schema": share,
                "tokens/s": round(statistics.median(turn.tokens_per_s for turn in turns), 1),
                "over none": round(statistics.median(ratios), 4),
                "least": round(min(ratios), 4),
                "most": round(max(ratios), 4),
            }
        )
        if share == "all":
            result.figures["json_schema_x" if name == "greedy" else f"json_schema_{name}_x"] = statistics.median(ratios)
    beside = [free.free_ms / half.free_ms for half, free in zip(rounds["half"], rounds["none"], strict=True)]
    if name == "greedy":
        result.figures["beside_json_schema_x"] = statistics.median(beside)


def _host_parts(llm: LLM, prompts: list[list[int]], size: Size, temperature: float) -> list[dict[str, object]]:
    """The parts of a step, without a schema and with one for all streams."""
    found = {}
    for name, num_bound in (("none", 0), ("all", size.prompts)):
        parts = StepParts()
        with parts.watch(llm.engine):
            _run(llm, prompts, size, num_bound, temperature)
        found[name] = parts.milliseconds()
    rows: list[dict[str, object]] = []
    for part in found["all"]:
        row: dict[str, object] = {"part": part}
        for name, milliseconds in found.items():
            mean, late = milliseconds.get(part, (0.0, 0.0))
            row |= {name: round(mean, 3), f"{name}, 99th": round(late, 3)}
        rows.append(row)
    return rows


def _run(llm: LLM, prompts: list[list[int]], size: Size, num_bound: int, temperature: float) -> Round:
    """The first `num_bound` prompts have a schema."""
    params = [
        SamplingParams(
            max_tokens=size.output_tokens,
            temperature=temperature,
            seed=number,
            ignore_eos=True,
            grammar=_grammar() if number < num_bound else None,
        )
        for number in range(len(prompts))
    ]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started_at = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - started_at
    answers: list[Completion] = []
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"a prompt was refused: {output.error}")
        answers += output.outputs
    if any(len(answer.token_ids) != size.output_tokens for answer in answers):
        raise RuntimeError(f"an answer is shorter than asked for: {answers[0].finish_reason}, {answers[0].text[:80]}")
    for answer in answers[:num_bound]:
        said = b"".join(map(llm.engine.prompts.token_bytes, answer.token_ids))
        if not re.match(rb"\s*+\[\s*+\{\s*+\"name\"", said):
            raise RuntimeError(f"an answer does not follow its schema: {answer.text[:80]}")
    free = [1000 * answer.time_per_output_token_s for answer in answers[num_bound:]]
    return Round(len(answers) * size.output_tokens / seconds, statistics.median(free) if free else 0.0)


def _grammar() -> Grammar:
    return Grammar("json_schema", json.dumps(SCHEMA))


def _open(arguments: argparse.Namespace, size: Size, folder: str) -> LLM:
    num_tokens = size.prompts * (size.input_tokens + size.output_tokens + 16)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    return LLM(
        folder,
        load_format="dummy",
        device=arguments.device,
        kv_cache_space=kv_bytes(arguments, 2 * num_tokens),
        max_model_len=size.input_tokens + size.output_tokens + 32,
        max_num_requests=arguments.max_num_requests or size.prompts,
        max_num_batched_tokens=arguments.max_num_batched_tokens or 8192,
    )


def _size(arguments: argparse.Namespace) -> Size:
    if arguments.device == "cuda":
        size = Size(prompts=32, input_tokens=256, output_tokens=256, repeats=5 if arguments.quick else 9)
    else:
        size = Size(prompts=8, input_tokens=32, output_tokens=24, repeats=2)
    return Size(**{**vars(size), **chosen(arguments, "prompts", "input_tokens", "output_tokens", "repeats")})


if __name__ == "__main__":
    sys.exit(main())
