"""Long documents that are computed once and survive restarts. No GPU needed.

    python -m examples.demo

Serves two models with a cache server and both HTTP APIs (`kvtier serve`). The small one in examples/model reads a
chronicle and answers a question about it in words. A larger one with random weights reads 8,000 tokens, for the clock.
Then the engines are restarted, then everything, and both are asked again.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from examples.use_remote_KV_cache.asking import Answer, Refused, ask
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.make_dummy_inputs import make_document
from examples.use_remote_KV_cache.make_model import make_model
from examples.use_remote_KV_cache.speed_test import chart, figures_of, tell_story
from examples.village import make_chronicle
from kvtier.models.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parent / "model"
PROMPT_TOKENS = 8000
CHRONICLE_TOKENS = 1000
MAX_TOKENS = 24
_LOG_LINES = 20
_DEPLOYMENT = """\
models:
  - model: {model}
    name: village             # small and trained, for answers in words
    kv_cache_space: 64MiB
  - model: small-model
    load_format: dummy        # larger, with random weights, for the clock
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


class _Question:
    """A question about a chronicle, asked again and again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._chronicle, facts = make_chronicle(CHRONICLE_TOKENS)
        self._fact = facts[len(facts) // 2]
        self.answers: set[str] = set()

    @property
    def words(self) -> str:
        return self._fact.questions[0]

    def ask(self) -> None:
        answer = ask(self._url, "village", self._chronicle, question=self.words, max_tokens=MAX_TOKENS)
        self.answers.add(answer.text)
        print(f"  {'':18} village says: {answer.text}  ({answer.sources})", flush=True)


def main() -> int:
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as scratch:
        folder = Path(scratch)
        openai, ollama = free_ports(2)
        make_model(folder / "small-model", "small")
        file = folder / "deploy.yml"
        file.write_text(_DEPLOYMENT.format(model=MODEL, openai=openai, ollama=ollama))
        question = _Question(f"http://127.0.0.1:{openai}")
        print("This deployment, started with `kvtier serve deploy.yml`:\n")
        print("".join(f"    {line}\n" for line in file.read_text().splitlines()))
        print(
            f"A document of about {PROMPT_TOKENS} tokens for the larger model; time to the first token of the answer."
        )
        print(f"A chronicle of about {CHRONICLE_TOKENS} tokens for the small one, and a question:\n")
        print(f"  {question.words}\n", flush=True)
        log_file = folder / "log"
        try:
            with log_file.open("w") as log:
                answers = _run(file, f"http://127.0.0.1:{openai}", question, log)
        except (Refused, OSError, RuntimeError) as error:
            lines = log_file.read_text().splitlines()[-_LOG_LINES:]
            print("\n".join([*lines, f"error: {error}"]), file=sys.stderr)
            return 1
    return _report(answers, question, time.monotonic() - started_at)


def _run(file: Path, url: str, question: _Question, log: IO[str]) -> dict[str, Answer]:
    document = make_document(Tokenizer(file.parent / "small-model"), PROMPT_TOKENS)
    return tell_story(file, url=url, model="small-model", document=document, log=log, and_then=question.ask)


def _report(answers: dict[str, Answer], question: _Question, seconds: float) -> int:
    print(f"\n{chart(answers)}\n")
    texts = {answer.text for answer in answers.values()}
    if len(texts) != 1 or len(question.answers) != 1:
        print(f"the answers differ, which is a bug: {texts | question.answers}", file=sys.stderr)
        return 1
    figures = figures_of(answers)
    print(f"The same answer each time: {question.answers.pop()}")
    print("Times faster than computing: " + ", ".join(f"{name} {value:.0f}" for name, value in figures.items()))
    print(f"Done in {seconds:.0f} s; everything was stopped and removed.\n")
    print("Next: docs/quickstart.md does the same step by step. Or put your own model into such a file, and run\n")
    print("    .venv/bin/kvtier check deploy.yml && .venv/bin/kvtier serve deploy.yml")
    return 0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


if __name__ == "__main__":
    sys.exit(run_command(main))
