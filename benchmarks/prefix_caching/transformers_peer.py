"""transformers' continuous batching (`generate_batch`) on the same prompts: the peer, in a process of its own.

Its process has the device to itself, ends with its memory, and is killed when it takes too long; whatever keeps it from
doing the work becomes the reason why it is absent. It gets the same shape with random weights, samples greedily, and
is timed on its second batch of each kind, with the manager of the first kept.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import console
from benchmarks.model_configs import MODEL_CONFIGS

_PAGE_TOKENS = 256


@dataclass(frozen=True)
class PeerRound:
    """`warm_up` has other prompts of the same kind, answered before, untimed."""

    name: str
    warm_up: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    num_outputs: int


@dataclass(frozen=True)
class PeerResult:
    """Requests per second by round, or the reason for their absence."""

    qps: Mapping[str, float]
    details: Mapping[str, object]
    absent: str | None = None


def measure_peer(
    shape: str, device: str, rounds: Sequence[PeerRound], *, max_batch_tokens: int, timeout_s: float
) -> PeerResult:
    """Run the peer. Never raises for its errors. Rounds before an error count."""
    with tempfile.TemporaryDirectory(prefix="kvtier-peer-") as folder:
        work, done = Path(folder) / "work.json", Path(folder) / "done.json"
        work.write_text(
            json.dumps(
                {
                    "config": MODEL_CONFIGS[shape],
                    "device": device,
                    "max_batch_tokens": max_batch_tokens,
                    "rounds": [
                        {"name": one.name, "warm_up": one.warm_up, "prompts": one.prompts, "outputs": one.num_outputs}
                        for one in rounds
                    ],
                }
            )
        )
        command = [sys.executable, "-m", "benchmarks.prefix_caching.transformers_peer", str(work), str(done)]
        console.print(f"transformers: {', '.join(one.name for one in rounds)}, at most {timeout_s:.0f} s")
        try:
            process = subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            problem = None if process.returncode == 0 else _last_line(process.stderr, process.returncode)
        except subprocess.TimeoutExpired:
            problem = f"not done after {timeout_s:.0f} s"
        document: dict[str, Any] = json.loads(done.read_text()) if done.exists() else {}
    qps = {str(name): float(value) for name, value in document.get("qps", {}).items()}
    return PeerResult(qps, document.get("details", {}), document.get("problem") or problem)


def _last_line(stderr: bytes, returncode: int) -> str:
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"exit {returncode}: {lines[-1].strip()[:300] if lines else 'no message'}"


def _serve(work: dict[str, Any], done: Path) -> None:
    """In the peer's process. `done` is written after each round."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    document: dict[str, Any] = {"qps": {}, "details": {"transformers": transformers.__version__}}
    config = transformers.AutoConfig.for_model(**work["config"])
    dtype = getattr(torch, work["config"]["torch_dtype"])
    with torch.device(work["device"]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    clock = time.perf_counter
    choices: list[dict[str, Any]] = [{}, {"max_batch_tokens": work["max_batch_tokens"]}]
    if work["device"] == "cpu":  # one thread and CPU time, as ours; it finds its sizes on a GPU alone
        torch.set_num_threads(1)
        clock = time.process_time
        longest = max(len(prompt) + one["outputs"] for one in work["rounds"] for prompt in one["prompts"])
        count = max(len(one["prompts"]) for one in work["rounds"])
        pages = count * (-(-longest // _PAGE_TOKENS) + 1)
        choices = [{"num_blocks": 2 * pages, "max_batch_tokens": work["max_batch_tokens"]}]
    for one in work["rounds"]:
        for settings in choices:  # its own choice of sizes first
            try:
                document["qps"][one["name"]] = _timed(transformers, model, one, settings, clock)
                document["details"] |= {"attention": str(model.config._attn_implementation), **settings}
                break
            except Exception as error:  # the top of this process: the reason goes into the result
                document["problem"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            model.destroy_cached_continuous_batching_manager()
            torch.cuda.empty_cache()
        done.write_text(json.dumps(document))


def _timed(
    transformers: Any, model: Any, one: dict[str, Any], settings: dict[str, Any], clock: Callable[[], float]
) -> float:
    def answer(prompts: list[list[int]]) -> float:
        generation = transformers.GenerationConfig(
            max_new_tokens=one["outputs"], do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        started_at = clock()
        answers = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
            persistent_manager=True,
        )
        elapsed = clock() - started_at
        whole = [len(each.generated_tokens) == one["outputs"] for each in answers.values()]
        if len(whole) != len(prompts) or not all(whole):
            reasons = {str(each.error) for each in answers.values() if each.error}
            raise RuntimeError(f"{sum(whole)} of {len(prompts)} answers are whole; {'; '.join(reasons)[:200]}")
        return elapsed

    answer(one["warm_up"])
    elapsed = answer(one["prompts"])
    model.destroy_cached_continuous_batching_manager()
    return len(one["prompts"]) / elapsed


if __name__ == "__main__":
    _serve(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
