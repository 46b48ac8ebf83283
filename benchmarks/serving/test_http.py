"""Tokens per second and times to first tokens through the OpenAI server, relative to the engine in one process.

    python -m benchmarks.serving.test_http --quick

Both sides take turns, each time in new processes: engine, HTTP, engine, HTTP.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from benchmarks.harness import Result, console, print_figures, print_table
from benchmarks.model_configs import MODEL_CONFIGS, SMALL_SHAPE
from benchmarks.prefix_caching.options import make_parser
from benchmarks.serving.rounds import Load, Round
from benchmarks.serving.word_tokenizer import save_word_tokenizer
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.deployment import Deployment

_BARS = {"http_over_engine": ">= 0.95", "http_ttft_over_engine": "<= 1.05"}
_TURNS = 2


def main() -> int:
    parser = make_parser(__doc__ or "", "Qwen2.5-7B")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-tokens", type=int)
    parser.add_argument("--output-tokens", type=int)
    arguments = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    shape = arguments.model_shape or ("Qwen2.5-7B" if is_gpu else SMALL_SHAPE)
    with tempfile.TemporaryDirectory(prefix="kvtier-http-") as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODEL_CONFIGS[shape]))
        vocab_size = MODEL_CONFIGS[shape]["vocab_size"]
        assert isinstance(vocab_size, int)
        save_word_tokenizer(folder, vocab_size)
        load = Load(
            engine={
                "model": str(folder),
                "load_format": "dummy",
                "max_num_requests": max(32, arguments.streams),
                **({} if is_gpu else {"kv_cache_space": 512 << 20}),
            },
            vocab_size=vocab_size,
            num_streams=arguments.streams,
            input_tokens=arguments.input_tokens or (1000 if is_gpu else 64),
            output_tokens=arguments.output_tokens or (256 if is_gpu else 64),
            num_rounds=2 if arguments.quick else 4,
        )
        result = measure(load, shape, Path(scratch))
    result.write(arguments.json)
    return 0


def measure(load: Load, shape: str, scratch: Path) -> Result:
    """Round by round, the medians of both sides."""
    engine, http = [], []
    for turn in range(_TURNS):
        console.print(f"turn {turn + 1} of {_TURNS}: the engine in one process")
        engine += _side("benchmarks.serving.engine_side", [], msgspec.structs.replace(load, seed=turn))
        console.print(f"turn {turn + 1} of {_TURNS}: through the OpenAI server")
        with _serving(load, scratch) as port:
            http += _side("benchmarks.serving.http_side", [str(port)], msgspec.structs.replace(load, seed=turn))
    rows = [_row("engine in one process", engine), _row("OpenAI server", http)]
    figures = {
        "http_over_engine": _median(http, "tokens_per_s") / _median(engine, "tokens_per_s"),
        "http_ttft_over_engine": _median(http, "ttft_s") / _median(engine, "ttft_s"),
    }
    print_table(f"{shape}, {load.num_streams} streams, {load.input_tokens} in, {load.output_tokens} out", rows)
    print_figures(figures, _BARS)
    settings = msgspec.to_builtins(load) | {"model_shape": shape, "engine": {**load.engine, "model": shape}}
    return Result("serving.test_http", settings, rows, figures)


def _side(module: str, arguments: list[str], load: Load) -> list[Round]:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], input=msgspec.json.encode(load), stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(done.stdout, type=list[Round])


@contextlib.contextmanager
def _serving(load: Load, scratch: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    file = scratch / "deploy.yml"
    engine = {**load.engine}
    if "kv_cache_space" in engine:
        engine["kv_cache_space"] = f"{engine['kv_cache_space']}B"
    document = {"models": [{**engine, "name": "model"}], "http": {"openai": port, "ollama": None}}
    file.write_text(json.dumps(document))  # JSON is YAML
    with (scratch / "log").open("w") as log, Deployment(file, url=f"http://127.0.0.1:{port}", log=log):
        yield port


def _row(name: str, rounds: list[Round]) -> dict[str, object]:
    return {
        "side": name,
        "tokens_per_s": round(_median(rounds, "tokens_per_s"), 1),
        "ttft_ms": round(1000 * _median(rounds, "ttft_s"), 1),
        "rounds_tokens_per_s": " ".join(f"{one.tokens_per_s:.0f}" for one in rounds),
    }


def _median(rounds: list[Round], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in rounds))


if __name__ == "__main__":
    sys.exit(run_command(main))
