"""Real vLLM engines in their own processes, a model for them, and their times to the first token.

Importing this module sets the environment that vLLM reads when an engine starts. It binds threads: otherwise an engine
would have one core without a connector and two with one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm
from vllm import LLM, RequestOutput, SamplingParams

from kvtier.testing.tiny_models import VOCAB_SIZE, save_tiny_model

PAGE_TOKENS = 128
REUSED_TOKENS = 15 * PAGE_TOKENS
LONG_TOKENS = 60 * PAGE_TOKENS
TAIL_TOKENS = 40
ANSWER_TOKENS = 8
MAX_MODEL_LEN = 8192

_MODEL: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
}
_PATIENCE_S = 60.0


def save_model(folder: Path) -> int:
    """Write a random Qwen2 of about 36M parameters in float32; returns how many."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = save_tiny_model(folder, "qwen2", with_tokenizer=False, **_MODEL)
    return int(model.num_parameters())


def kv_bytes_per_token() -> int:
    return int(2 * 4 * _MODEL["num_layers"] * _MODEL["num_key_value_heads"] * _MODEL["head_dim"])


def stand_settings() -> dict[str, object]:
    """A result file's description of the engines."""
    return {
        "vllm": vllm.__version__,
        "model": {"family": "qwen2", **_MODEL},
        "dtype": "float32",
        "page_tokens": PAGE_TOKENS,
        "threads": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        "multiprocessing": True,
    }


def tokens_of(count: int, *name: object) -> list[int]:
    """`count` token ids, which differ from the first on for different names."""
    dice = random.Random(repr(name))
    return [dice.randrange(VOCAB_SIZE) for _ in range(count)]


# --- what an engine keeps its KV with ------------------------------------------------------------------------------


def kvtier_transfer(server: str, *, connector: str = "KvtierConnector", module: str = "kvtier.plugins.vllm") -> Any:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"server": server},
    }


def native_transfer(folder: Path, memory_bytes: int) -> Any:
    """vLLM's own tiers: host memory, and files below that outlive the engine."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "benchmarks.vllm.native_spec",
            "cpu_bytes_to_use": memory_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
    }


# --- engines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt, and the time to its first token."""

    tokens: list[int]
    num_cached: int
    first_token_s: float


class VllmEngine:
    """One engine; `transfer` is its `kv_transfer_config`. `close` ends its processes."""

    def __init__(self, model: Path, transfer: Mapping[str, Any] | None, **overrides: Any) -> None:
        arguments: dict[str, Any] = {
            "dtype": "float32",
            "block_size": PAGE_TOKENS,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "disable_log_stats": True,
            **overrides,
        }
        if transfer is not None:
            arguments["kv_transfer_config"] = dict(transfer)
        started_at = time.perf_counter()
        self._llm = LLM(str(model), **arguments)
        self.start_s = time.perf_counter() - started_at
        self.ask(tokens_of(2 * PAGE_TOKENS, "warm-up", uuid.uuid4()))  # the first steps of an engine are slow

    def ask(self, prompt: Sequence[int], *, num_tokens: int = ANSWER_TOKENS) -> Answer:
        """A greedy answer to one prompt, without other requests."""
        engine = self._llm.llm_engine
        started_at = time.perf_counter()
        engine.add_request(str(uuid.uuid4()), {"prompt_token_ids": list(prompt)}, _greedy(num_tokens))
        answer: Answer | None = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                first_token_s = time.perf_counter() - started_at if answer is None else answer.first_token_s
                answer = _answer(output, first_token_s)
        assert answer is not None
        return answer

    def ask_all(self, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> tuple[list[Answer], float]:
        """Answers to prompts that are sent together, and the seconds until the last of them.

        Their `first_token_s` is not measured.
        """
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        started_at = time.perf_counter()
        outputs = self._llm.generate(asked, _greedy(num_tokens), use_tqdm=False)
        seconds = time.perf_counter() - started_at
        return [_answer(output, 0.0) for output in outputs], seconds

    def gaps_beside(
        self, streams: Sequence[Sequence[int]], beside: Sequence[Sequence[int]], *, every: int
    ) -> list[float]:
        """Seconds between tokens of `streams`; a prompt of `beside` is sent after each `every` of their tokens."""
        engine = self._llm.llm_engine
        num_tokens = every * (len(beside) + 2)
        for number, prompt in enumerate(streams):
            engine.add_request(
                f"stream-{number}-{uuid.uuid4()}", {"prompt_token_ids": list(prompt)}, _greedy(num_tokens)
            )
        told_at: dict[str, float] = {}
        gaps: list[float] = []
        waiting = list(beside)
        while engine.has_unfinished_requests():
            outputs = [output for output in engine.step() if output.request_id.startswith("stream-")]
            now = time.perf_counter()
            if len(told_at) == len(streams):
                gaps += [now - told_at[output.request_id] for output in outputs]
            told_at |= {output.request_id: now for output in outputs}
            is_next = len(gaps) >= every * len(streams) * (len(beside) - len(waiting) + 1)
            if waiting and is_next:
                prompt = waiting.pop()
                engine.add_request(str(uuid.uuid4()), {"prompt_token_ids": list(prompt)}, _greedy(1))
        return gaps

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache; it is not emptied while pages of finished requests are being saved."""
        wait_until(self._llm.reset_prefix_cache, "vLLM's prefix cache empty")

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown(timeout=_PATIENCE_S)


@contextlib.contextmanager
def engine(model: Path, transfer: Mapping[str, Any] | None = None, **overrides: Any) -> Iterator[VllmEngine]:
    one = VllmEngine(model, transfer, **overrides)
    try:
        yield one
    finally:
        one.close()


def _answer(output: RequestOutput, first_token_s: float) -> Answer:
    return Answer(list(output.outputs[0].token_ids), output.num_cached_tokens or 0, first_token_s)


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


# --- waiting -------------------------------------------------------------------------------------------------------


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"in vain waited for: {what}")
        time.sleep(0.02)
