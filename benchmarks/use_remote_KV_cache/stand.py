"""The example's deployment in its own folder: model, file, document; and its use of the disk."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import free_port
from benchmarks.prefix_caching.options import device_settings, parse
from benchmarks.prefix_caching.options import make_parser as make_engine_parser
from examples.use_remote_KV_cache.make_dummy_inputs import make_document
from examples.use_remote_KV_cache.make_model import make_model
from kvtier.models.tokenizer import Tokenizer

_EXAMPLES = Path(__file__).parents[2] / "examples" / "use_remote_KV_cache"
_CPU_TOKENS, _GPU_TOKENS = 6000, 100_000
_ROOM_TOKENS = 1000
"""A document is a little longer than the part that is used."""


@dataclass(frozen=True)
class Example:
    """`file` is the deployment, `cache` its cache folder. Both programs run in the folder that holds them."""

    file: Path
    model: str
    url: str
    document: str
    num_tokens: int
    cache: Path
    log: Path

    def disk_bytes(self) -> int:
        """The size of the cache folder on disk."""
        return sum(path.stat().st_blocks * 512 for path in self.cache.rglob("*") if path.is_file())


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = make_engine_parser(description, "glm-4-9b, fp8")
    parser.add_argument("--length", type=int, help=f"tokens of a document ({_GPU_TOKENS}; {_CPU_TOKENS} on a CPU)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put all files")
    return parser


def parse_options(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, object]]:
    """The arguments, and a result's description of the machine."""
    arguments = parse(parser)
    settings = {"quick": arguments.quick, **device_settings(arguments.device, "time on the wall")}
    return arguments, settings


@contextlib.contextmanager
def example(arguments: argparse.Namespace) -> Iterator[Example]:
    """On a GPU the deployment of the documents the project comes from, with random weights; else a small one."""
    is_cpu = arguments.device == "cpu"
    shape, model, name = (
        ("small", "small-model", "deploy_cpu.yml") if is_cpu else ("glm-4-9b",) * 2 + ("deploy_dummy.yml",)
    )
    num_tokens = arguments.length or (_CPU_TOKENS // 4 if arguments.quick else _CPU_TOKENS if is_cpu else _GPU_TOKENS)
    text = (_EXAMPLES / name).read_text()
    port = free_port() if is_cpu else 8080
    text = text.replace("openai: 8080\n  ollama: 11434", f"openai: {port}")
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="kvtier-example-", dir=arguments.folder) as place:
        folder = Path(place)
        (folder / "deploy.yml").write_text(text)
        os.chdir(folder)
        try:
            make_model(folder / model, shape)
            document = make_document(Tokenizer(folder / model), num_tokens + _ROOM_TOKENS)
            yield Example(
                file=folder / "deploy.yml",
                model=model,
                url=f"http://127.0.0.1:{port}",
                document=document,
                num_tokens=num_tokens,
                cache=folder / f"{model}-cache",
                log=folder / "log",
            )
        finally:
            os.chdir(before)
