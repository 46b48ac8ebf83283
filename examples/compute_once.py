"""A prompt that is computed once: by one engine, for the next one, for one after the server's restart. No GPU needed.

    python -m examples.compute_once

A model with random weights answers a long prompt four times, and says how long its first token took: cold; again; an
engine that was just started and finds the KV in the cache server; and after the server, too, was started anew and has
it on disk.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import torch

from kvtier import LLM, SamplingParams
from kvtier.testing.servers import cache_server

PROMPT_TOKENS = 4000
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}


def main() -> int:
    torch.set_num_threads(2)
    dice = random.Random(0)
    prompt = [dice.randrange(8192) for _ in range(PROMPT_TOKENS)]
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODEL))
        disk = ("--folder", str(Path(scratch, "cache")), "--disk", "1GiB")
        print(f"A model with random weights answers a prompt of {PROMPT_TOKENS} tokens; time to the first token:\n")
        with cache_server(*disk, memory="512MiB") as server:
            with _engine(folder, server.unix) as llm:
                first, cold_s = _ask(llm, prompt, "cold")
                _ask(llm, prompt, "asked again", cold_s)
                assert llm.engine.traffic is not None
                llm.engine.traffic.settle()
            with _engine(folder, server.unix) as llm:
                second, _ = _ask(llm, prompt, "engine restarted", cold_s)
        with cache_server(*disk, memory="512MiB") as server, _engine(folder, server.unix) as llm:
            third, _ = _ask(llm, prompt, "server and engine restarted", cold_s)
            print(f"\nwhy not more: {llm.explain('request-0').sentence()}")
    if not first == second == third:
        print("the answers differ: this is a bug")
        return 1
    print("the answers are the same")
    return 0


def _engine(folder: Path, server: str) -> LLM:
    return LLM(str(folder), load_format="dummy", kv_cache_space=256 << 20, cache_server=server)


def _ask(llm: LLM, prompt: list[int], what: str, cold_s: float | None = None) -> tuple[list[int], float]:
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0.0), progress=False)
    (answer,) = output.outputs
    seconds = answer.ttft_s
    sources = ", ".join(f"{count} tokens from {tier}" for tier, count in answer.cached_tokens.items() if count)
    gain = "" if cold_s is None else f": {cold_s / seconds:.0f} times faster"
    print(f"  {what:28} {1000 * seconds:6.0f} ms  {sources or 'all computed'}{gain}")
    return answer.token_ids, seconds


if __name__ == "__main__":
    sys.exit(main())
