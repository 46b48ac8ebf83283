"""vLLM on the same work as kvtier's engine: long prompts, one very long one, and prompts with a common prefix.

    python -m benchmarks.peers.vllm_engine default            # computed, GPU hits, first token, sweep over hit rates
    python -m benchmarks.peers.vllm_engine offload            # GPU hits and host hits with its native offloading
    python -m benchmarks.peers.vllm_engine small-steps        # 1024 tokens a step at most

Runs in vLLM's environment, with this repository as the working directory; of kvtier it needs nothing but the shapes.
Random weights, random token ids, greedy answers of a fixed length, everything submitted at once. Each mode is a process
of its own. README.md says what was run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model_configs import MODEL_CONFIGS, model_folder

GENERAL: Mapping[str, object] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 32768,
    "gpu_memory_utilization": 0.85,
    "block_size": 16,
    "disable_log_stats": True,
    "seed": 0,
}
MODES: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "offload": {"kv_offloading_size": 40.0, "kv_offloading_backend": "native"},
    "small-steps": {"max_num_batched_tokens": 1024},
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
HIT_RATES = (0, 30, 50, 80, 90, 100)
_RESET_S = 30.0


@dataclass
class Measurement:
    """One engine and its results."""

    llm: Any
    vocab_size: int
    rows: list[dict[str, object]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def prompts(self, seed: object, count: int, length: int, hit_rate: int = 0) -> list[list[int]]:
        """Random token ids; the first `hit_rate` percent of all prompts are the same."""
        dice = random.Random(repr(seed))
        common = [dice.randrange(self.vocab_size) for _ in range(length * hit_rate // 100)]
        return [common + [dice.randrange(self.vocab_size) for _ in range(length - len(common))] for _ in range(count)]

    def seconds(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> float:
        """The seconds until the last answer."""
        import vllm

        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_outputs, min_tokens=num_outputs, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        gc.collect()
        started_at = time.perf_counter()
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        elapsed = time.perf_counter() - started_at
        if any(len(output.outputs[0].token_ids) != num_outputs for output in outputs):
            raise RuntimeError("an answer is shorter than asked for")
        return elapsed

    def forget(self) -> None:
        """Empty the GPU's prefix cache; that is refused while blocks are being copied away."""
        deadline = time.monotonic() + _RESET_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("the prefix cache cannot be emptied")
            time.sleep(0.05)

    def note(self, figure: str, value: float, **row: object) -> None:
        self.figures[figure] = round(value, 4)
        self.rows.append({"figure": figure, "value": round(value, 4), **row})
        print(f"{figure}: {value:.4g}  {row or ''}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    import vllm

    config = MODEL_CONFIGS[arguments.model_shape]
    given: dict[str, Any] = {**GENERAL, **MODES[arguments.mode], "dtype": str(config["torch_dtype"])}
    given |= dict(_setting(text) for text in arguments.set)
    with model_folder(arguments.model_shape) as folder:
        started_at = time.perf_counter()
        measurement = Measurement(vllm.LLM(folder, **given), int(str(config["vocab_size"])))
        start_s = time.perf_counter() - started_at
        measure(measurement, arguments)
    document = {
        "benchmark": "peers.vllm_engine",
        "settings": {**vars(arguments), "vllm": vllm.__version__, "start_s": round(start_s, 1), **given},
        "rows": measurement.rows,
        "figures": measurement.figures,
    }
    text = json.dumps(document, indent=1, default=str) + "\n"
    if arguments.json in (None, "-"):
        print(text)
    else:
        Path(arguments.json).write_text(text)
    return 0


def measure(one: Measurement, arguments: argparse.Namespace) -> None:
    one.seconds(one.prompts("warm-up", 2, min(2000, arguments.input_tokens)), 8)
    if arguments.mode == "offload":
        measure_long(one, arguments, "host_hit", has_reset=True)
        measure_first_token(one, arguments, "host_hit", has_reset=True)
        return
    measure_long(one, arguments, "gpu_hit", has_reset=False)
    if arguments.mode == "default":
        measure_first_token(one, arguments, "gpu_hit", has_reset=False)
    measure_sweep(one, arguments)


def measure_long(one: Measurement, arguments: argparse.Namespace, kind: str, *, has_reset: bool) -> None:
    """The same prompts again and again: the first round computes; with `has_reset` the later ones load."""
    for num_outputs in arguments.outputs:
        prompts = one.prompts(("long", num_outputs), arguments.prompts, arguments.input_tokens)
        qps = []
        for _ in range(1 + arguments.rounds):
            if has_reset:
                one.forget()
            qps.append(arguments.prompts / one.seconds(prompts, num_outputs))
        rounds = [round(value, 2) for value in qps]
        one.note(f"cold_n{num_outputs}", qps[0])
        one.note(f"{kind}_n{num_outputs}", statistics.median(qps[1:]), rounds=rounds)


def measure_first_token(one: Measurement, arguments: argparse.Namespace, kind: str, *, has_reset: bool) -> None:
    prompts = one.prompts("first token", 1, arguments.ttft_tokens)
    times: list[float] = []
    for _ in range(1 + arguments.rounds):
        if has_reset and times:
            one.forget()
        times.append(1000 * one.seconds(prompts, 1))
    one.note("ttft_30k_cold_ms", times[0])
    one.note(f"ttft_30k_{kind}_ms", statistics.median(times[1:]), rounds=[round(value, 2) for value in times])


def measure_sweep(one: Measurement, arguments: argparse.Namespace) -> None:
    """From an empty cache: the first request computes the common part."""
    for hit_rate in arguments.hit_rates:
        one.forget()
        prompts = one.prompts(("sweep", hit_rate), arguments.sweep_prompts, arguments.sweep_tokens, hit_rate)
        one.note(f"sweep_{hit_rate}", arguments.sweep_prompts / one.seconds(prompts, 24))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=tuple(MODES))
    parser.add_argument("--json", metavar="FILE", help="file for the result (default: standard output)")
    parser.add_argument("--model-shape", choices=tuple(MODEL_CONFIGS), default="Qwen2.5-7B")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--input-tokens", type=int, default=10240)
    parser.add_argument("--outputs", type=int, nargs="+", default=[2, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first")
    parser.add_argument("--ttft-tokens", type=int, default=30000)
    parser.add_argument("--sweep-prompts", type=int, default=1000)
    parser.add_argument("--sweep-tokens", type=int, default=1000)
    parser.add_argument("--hit-rates", type=int, nargs="+", default=list(HIT_RATES))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="another argument of vllm.LLM")
    return parser.parse_args(argv)


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


if __name__ == "__main__":
    sys.exit(main())
