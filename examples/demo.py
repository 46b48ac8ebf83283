"""A long document that is computed once: by a whole deployment, for itself and for those after it. No GPU needed.

    python -m examples.demo

Makes a small model with random weights, serves it with a cache server and both HTTP APIs (`kvtier serve`), asks about
a document of 8,000 tokens, starts the engine again, starts everything again, and shows how long the first token took.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from pathlib import Path

from examples.use_remote_KV_cache.asking import Refused
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.make_dummy_inputs import make_document
from examples.use_remote_KV_cache.make_model import make_model
from examples.use_remote_KV_cache.speed_test import chart, figures_of, tell_story
from kvtier.models.tokenizer import Tokenizer

_PROMPT_TOKENS = 8000
_LOG_LINES = 20
_DEPLOYMENT = """\
models:
  - model: small-model
    load_format: dummy        # random weights
    max_num_batched_tokens: 1024
    kv_cache_space: 512MiB
cache:
  memory: 512MiB
  disk: 1GiB
  folder: cache
http:
  openai: {openai}
  ollama: {ollama}
"""


def main() -> int:
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as scratch:
        folder = Path(scratch)
        openai, ollama = _free_ports(2)
        make_model(folder / "small-model", "small")
        file = folder / "deploy.yml"
        file.write_text(_DEPLOYMENT.format(openai=openai, ollama=ollama))
        document = make_document(Tokenizer(folder / "small-model"), _PROMPT_TOKENS)
        print("This deployment, started with `kvtier serve deploy.yml`:\n")
        print("".join(f"    {line}\n" for line in file.read_text().splitlines()))
        print(f"A document of about {_PROMPT_TOKENS} tokens; time to the first token of the answer:\n", flush=True)
        log_file = folder / "log"
        try:
            with log_file.open("w") as log:
                answers = tell_story(
                    file, url=f"http://127.0.0.1:{openai}", model="small-model", document=document, log=log
                )
        except (Refused, OSError, RuntimeError) as error:
            lines = log_file.read_text().splitlines()[-_LOG_LINES:]
            print("\n".join([*lines, f"error: {error}"]), file=sys.stderr)
            return 1
    print(f"\n{chart(answers)}\n")
    texts = {answer.text for answer in answers.values()}
    if len(texts) != 1:
        print(f"the answers differ, which is a bug: {texts}", file=sys.stderr)
        return 1
    figures = figures_of(answers)
    print(f"The same answer each time: {texts.pop()!r}")
    print("Faster than computing it: " + ", ".join(f"{name} {value:.0f}" for name, value in figures.items()))
    print(f"Done in {time.monotonic() - started_at:.0f} s; everything was stopped and removed.\n")
    print("Next: put a model of yours into a file like the one above (README.md explains it), and\n")
    print("    .venv/bin/kvtier check deploy.yml && .venv/bin/kvtier serve deploy.yml")
    return 0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


if __name__ == "__main__":
    sys.exit(run_command(main))
