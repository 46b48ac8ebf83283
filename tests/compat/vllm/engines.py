"""vLLM engines in this process, and what the cache server behind them holds.

Importing this sets the environment that vLLM reads when an engine starts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.resource_tracker
import os
import random
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # these models are tiny, and threads that meet after each operation crawl on a busy machine
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

import kvtier
from kvtier.blocks.hashing import salted_root
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.client.known_namespace import KnownNamespace
from kvtier.testing.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.waiting import wait_until

multiprocessing.resource_tracker.ensure_running()  # else the first engine in processes of its own leaves it behind

# An engine that starts or stops collects garbage eight times, each time looking at all that the imports have left.
gc.collect()
gc.freeze()
for name in ("freeze", "unfreeze"):  # vLLM would thaw it
    setattr(gc, name, lambda: None)

# Each engine looks for kernels to replace in all modules; after the first there are none. Not in older releases.
if callable(getattr(current_platform, "register_triton_kernel_overrides", None)):  # unknown names are None
    replace_kernels = functools.cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(replace_kernels)

NUM_LAYERS = 2
KV_HEADS = 2
HEAD_DIM = 64
"""vLLM's attention on CPUs knows no smaller heads than 32."""
MAX_MODEL_LEN = 1024

_NUM_PAGES = 1024
"""Writing the zeros of as many as vLLM makes takes longer than all else of a start."""
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt."""

    tokens: list[int]
    num_cached: int


# --- models and prompts --------------------------------------------------------------------------------------------


@functools.cache
def model_folder(family: str = "llama", *, seed: int = 0) -> Path:
    """A tiny checkpoint, written once for all tests of this process."""
    folder = Path(_models().name) / f"{family}-{seed}"
    save_model(folder, family, seed=seed)
    return folder


def save_model(folder: Path, family: str = "llama", *, seed: int = 0) -> Any:
    """Write a tiny checkpoint whose heads vLLM's CPU attention can do; returns transformers' model of it."""
    return save_tiny_model(
        folder,
        family,
        num_layers=NUM_LAYERS,
        seed=seed,
        hidden_size=4 * HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_MODEL_LEN,
    )


@functools.cache
def _models() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvtier-vllm-")


def tokens_of(count: int, seed: int = 1) -> list[int]:
    """`count` token ids, others for each seed from the first on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()


# --- engines -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(
    model: Path,
    server: str | None = None,
    *,
    dtype: str = "float32",
    page_tokens: int = 32,
    settings: Mapping[str, object] | None = None,
    failure_policy: str = "recompute",
    has_module_path: bool = True,
    **overrides: Any,
) -> Iterator[LLM]:
    """vLLM in this process, with the plug-in if there is a `server`; nothing of it is left afterwards.

    What is cached is loaded, unless `settings` say otherwise: these models compute faster than anything loads. And it
    is waited for, so that a busy machine makes no miss of a hit.
    """
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "block_size": page_tokens,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": _NUM_PAGES,
        "disable_log_stats": False,
        **overrides,
    }
    if server is not None or settings is not None:
        address = {} if server is None else {"server": server}
        arguments["kv_transfer_config"] = {
            "kv_connector": "KvtierConnector",
            **({"kv_connector_module_path": "kvtier.plugins.vllm"} if has_module_path else {}),
            "kv_role": "kv_both",
            "kv_load_failure_policy": failure_policy,
            "kv_connector_extra_config": {
                **address,
                "always_load": True,
                "match_timeout_s": _PATIENCE_S,
                "timeout_s": _PATIENCE_S,
                **(settings or {}),
            },
        }
    llm: LLM | None = None
    try:
        llm = LLM(str(model), **arguments)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        for process in multiprocessing.active_children():  # of an engine with processes of its own
            process.join(_PATIENCE_S)


def ask(
    llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int = 12, cache_salt: str | None = None
) -> list[Answer]:
    """Greedy answers to prompts that are sent together."""
    salted = {} if cache_salt is None else {"cache_salt": cache_salt}
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt), **salted} for prompt in prompts], greedy(max_tokens), use_tqdm=False
    )
    return [_answer(output) for output in outputs]


def ask_one(llm: LLM, prompt: Sequence[int], *, max_tokens: int = 12, cache_salt: str | None = None) -> Answer:
    return ask(llm, [prompt], max_tokens=max_tokens, cache_salt=cache_salt)[0]


def answers_without_cache(
    model: Path, prompts: Sequence[Sequence[int]], *, max_tokens: int = 12, **arguments: Any
) -> list[list[int]]:
    """vLLM's answers to the prompts without the plug-in, computed once for all tests with the same prompts."""
    question = repr((model, model.stat().st_mtime_ns, prompts, max_tokens, sorted(arguments.items())))
    if question not in _answers:
        with engine(model, **arguments) as llm:
            _answers[question] = [answer.tokens for answer in ask(llm, prompts, max_tokens=max_tokens)]
    return _answers[question]


_answers: dict[str, list[list[int]]] = {}


@dataclass(frozen=True, slots=True)
class Drive:
    """The tokens, by name, of requests that were stepped through."""

    tokens: dict[str, list[int]]


def begin(llm: LLM, name: str, prompt: Sequence[int], *, max_tokens: int = 12) -> None:
    llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(max_tokens))


def drive(llm: LLM) -> Drive:
    """Step until every request is answered."""
    tokens: dict[str, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return Drive(tokens)


def ask_and_abort(llm: LLM, prompts: Sequence[Sequence[int]], *, num_steps: int, max_tokens: int = 64) -> None:
    """Begin to answer, and give all requests up after some steps."""
    names = [f"aborted-{uuid.uuid4()}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(max_tokens))
    for _ in range(num_steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(names)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def forget_prefixes(llm: LLM) -> None:
    """Empty vLLM's own prefix cache: what is a hit after this came from the server.

    Pages of finished requests are given back by the steps after their saves. In this process there are none unless
    someone asks for them; an engine in a process of its own takes them by itself.
    """

    def is_empty() -> bool:
        llm.llm_engine.step()
        return llm.reset_prefix_cache()

    wait_until(is_empty, "vLLM's prefix cache empty")


def counter(llm: LLM, name: str) -> int:
    """One of vLLM's own counters, added over its labels."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _answer(output: RequestOutput) -> Answer:
    return Answer(list(output.outputs[0].token_ids), output.num_cached_tokens or 0)


# --- the cache server ----------------------------------------------------------------------------------------------


def layout_of(known: KnownNamespace, dtype: str = "float32") -> KvLayout:
    """That of our tiny models' blocks."""
    return KvLayout(
        layers=NUM_LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, block_tokens=known.block_tokens
    )


def namespaces_at(server: str) -> list[KnownNamespace]:
    with kvtier.connect(server) as client:
        return client.namespaces()


def read_blocks(server: str, tokens: Sequence[int], *, dtype: str = "float32", cache_salt: str = "") -> torch.Tensor:
    """K and V of the longest prefix of `tokens` that the server holds: `(2, layers, heads, tokens, head_dim)`."""
    (known,) = namespaces_at(server)
    layout = layout_of(known, dtype)
    hashes = kvtier.block_hashes(_root(known, cache_salt), tokens, layout.block_tokens)
    buffers = [bytearray(layout.block_bytes) for _ in hashes]
    with kvtier.connect(server, layout=layout, namespace=known.namespace) as client:
        count = client.get(hashes, buffers)
    shape = (layout.layers, layout.kv_heads, layout.block_tokens, 2, layout.head_dim)
    blocks = [torch.frombuffer(buffer, dtype=getattr(torch, dtype)).view(shape) for buffer in buffers[:count]]
    assert blocks, "the server holds no block of these tokens"
    return torch.cat(blocks, dim=2).permute(3, 0, 1, 2, 4)


def num_stored_tokens(server: str, tokens: Sequence[int], *, dtype: str = "float32", cache_salt: str = "") -> int:
    """How many of `tokens`, from the first on, the server holds in any of its namespaces."""
    most = 0
    for known in namespaces_at(server):
        layout = layout_of(known, dtype)
        hashes = kvtier.block_hashes(_root(known, cache_salt), tokens, layout.block_tokens)
        with kvtier.connect(server, layout=layout, namespace=known.namespace) as client:
            held = client.contains(hashes)
        most = max(most, [*held, False].index(False) * layout.block_tokens)
    return most


def num_held(server: str) -> int:
    """Leases and reservations that clients hold at the server."""
    with kvtier.connect(server) as client:
        stats = client.stats()
    return int(stats["leases"]) + int(stats["reservations"])


def wait_until_stored(
    server: str, tokens: Sequence[int], *, dtype: str = "float32", cache_salt: str = "", count: int | None = None
) -> None:
    """Until the server holds the first `count` tokens; without `count`, every full block of them."""
    wanted = len(tokens) - len(tokens) % 32 if count is None else count
    wait_until(
        lambda: num_stored_tokens(server, tokens, dtype=dtype, cache_salt=cache_salt) >= wanted,
        f"{wanted} tokens stored",
    )


def _root(known: KnownNamespace, cache_salt: str) -> Namespace:
    """Where the hashes of a request begin: the salt is written as kvtier's own API writes it."""
    return salted_root(known.namespace, f"0:{cache_salt}" if cache_salt else "")


def add_noise(path: Path) -> None:
    """Bytes here and there: many blocks are hit, some are not. Padding between blocks has no checksum."""
    rng = random.Random(0)
    nbytes = path.stat().st_size
    assert nbytes > 0, "nothing is on disk"
    with path.open("r+b") as file:
        for _ in range(max(64, nbytes // 10_000)):
            file.seek(rng.randrange(nbytes - 64))
            file.write(rng.randbytes(64))
