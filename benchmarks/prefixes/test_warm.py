"""The first token of a question about a document that was warmed, or came in a pack, after a restart of everything.

    python -m benchmarks.prefixes.test_warm [--quick] [--repeats N] [--json FILE]

On a CPU, with the model of `examples/demo.py`, documents of 8,000 tokens (`--quick`: 2,000, of which a request's fixed
costs are a large share) and two deployments with folders and ports of their own. `cold` documents have the same
length and nothing in the cache; `warmed` was put into the cache by `kvtier warm` before the restart; `imported` came
to the second deployment by `kvtier pack`. Both must come from disk: anything else is an error. `once more` is the same
question right after: all of it is on the device, so this is the cost of a request without a load. Medians of
`--repeats` (3; 1 with `--quick`) documents or restarts.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Result, console, finish, make_parser, print_table
from examples.demo import free_ports
from examples.use_remote_KV_cache.asking import Answer, ask
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.deployment import Deployment
from examples.use_remote_KV_cache.make_dummy_inputs import make_document
from examples.use_remote_KV_cache.make_model import make_model
from kvtier.models.tokenizer import Tokenizer

_TOKENS, _QUICK_TOKENS = 8000, 2000
_REPEATS, _QUICK_REPEATS = 3, 1
_MODEL = "small-model"
_DEPLOYMENT = """\
models:
  - model: {model}
    load_format: dummy
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
_BARS = {"warmed_x": ">= 20", "imported_x": ">= 20"}


class _Stand:
    """A deployment in a folder of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        openai, ollama = free_ports(2)
        folder.mkdir()
        self.file = folder / "deploy.yml"
        self.file.write_text(_DEPLOYMENT.format(model=model, openai=openai, ollama=ollama))
        self.url = f"http://127.0.0.1:{openai}"
        self.log = folder / "log"

    def command(self, *arguments: str) -> None:
        """Run `kvtier ...`. Raises `RuntimeError` with its output if it fails."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvtier", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"kvtier {arguments[0]}: {done.stdout}{done.stderr}")

    def ask(self, document: str) -> Answer:
        ask(self.url, _MODEL, "Hello.")  # a process's first request pays for more than its prompt
        return ask(self.url, _MODEL, document)


def main() -> int:
    arguments = make_parser(__doc__ or "").parse_args()
    num_tokens = _QUICK_TOKENS if arguments.quick else _TOKENS
    repeats = arguments.repeats or (_QUICK_REPEATS if arguments.quick else _REPEATS)
    with tempfile.TemporaryDirectory(prefix="kvtier-warm-") as scratch:
        answers = _measure(Path(scratch), num_tokens, repeats)
    medians = {what: statistics.median(one.ttft_s for one in found) for what, found in answers.items()}
    rows: list[dict[str, object]] = [
        {
            "what": what,
            "ttft_s": round(medians[what], 4),
            "all_s": " ".join(f"{one.ttft_s:.3g}" for one in found),
            "times faster": round(medians["cold"] / medians[what], 1),
            "prompt_tokens": found[-1].prompt_tokens,
            "cached": found[-1].cached,
        }
        for what, found in answers.items()
    ]
    print_table("time to the first token", rows)
    figures = {f"{what}_x": medians["cold"] / medians[what] for what in ("warmed", "imported")}
    settings = {"num_tokens": num_tokens, "repeats": repeats, "deployment": _DEPLOYMENT}
    status = finish(Result("prefixes.test_warm", settings, rows, figures), _BARS, arguments.json)
    if len({one.text for what in ("warmed", "once more", "imported") for one in answers[what]}) > 1:
        console.print("the answers differ, which is a bug")
        return 1
    for what in ("warmed", "imported"):
        for one in answers[what]:
            if not _is_from_disk(one):
                console.print(f"what was {what} did not come from disk, as it should: {one.sources}")
                return 1
    return status


def _is_from_disk(answer: Answer) -> bool:
    """At least nine tenths of the prompt: all but the question and the block in which it begins."""
    others = sum(count for tier, count in answer.cached.items() if tier != "disk")
    return not others and answer.cached.get("disk", 0) >= 0.9 * answer.prompt_tokens


def _measure(folder: Path, num_tokens: int, repeats: int) -> dict[str, list[Answer]]:
    model = folder / _MODEL
    make_model(model, "small")
    tokenizer = Tokenizer(model)
    document, *others = (make_document(tokenizer, num_tokens, seed=seed) for seed in range(1 + repeats))
    text, pack = folder / "document.md", folder / "document.kvpack"
    text.write_text(document)
    answers: dict[str, list[Answer]] = {what: [] for what in ("cold", "warmed", "once more", "imported")}
    one, two = _Stand(folder / "one", model), _Stand(folder / "two", model)
    with one.log.open("w") as log, Deployment(one.file, url=one.url, log=log) as running:
        answers["cold"] = [one.ask(other) for other in others]
        one.command("warm", str(one.file), str(text), "--name", "document")
        one.command("pack", "export", "document", str(pack), "--deployment", str(one.file))
        for _ in range(repeats):
            running.restart_everything()
            answers["warmed"].append(one.ask(document))
            answers["once more"].append(one.ask(document))
    with two.log.open("w") as log, Deployment(two.file, url=two.url, log=log) as running:
        two.command("pack", "import", str(pack), "--deployment", str(two.file))
        for _ in range(repeats):
            running.restart_everything()
            answers["imported"].append(two.ask(document))
    return answers


if __name__ == "__main__":
    sys.exit(run_command(main))
