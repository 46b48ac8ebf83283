"""How long the first token of an answer about a long document takes.

Once, with a deployment that is running, whatever it has cached. For README's deployment of examples/model:

    python -m examples.use_remote_KV_cache.speed_test --filename village.txt

and for another model:

    python -m examples.use_remote_KV_cache.speed_test --model MODEL --filename dummy.txt

Or the whole story: start a deployment, ask with nothing cached, ask again, restart the engine and ask, restart
everything and ask. The deployment's cache folder must be empty at first.

    python -m examples.use_remote_KV_cache.speed_test --model MODEL --filename dummy.txt --deploy deploy.yml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import IO

from benchmarks.harness import Result
from examples.use_remote_KV_cache.asking import DEFAULT_URL, Answer, ask
from examples.use_remote_KV_cache.command import base_url, run_command
from examples.use_remote_KV_cache.deployment import Deployment

_BAR_CHARACTERS = 40
_WARM_UP = "Hello."


def tell_story(
    file: Path,
    *,
    url: str,
    model: str,
    document: str,
    log: IO[str] | None = None,
    and_then: Callable[[], None] = lambda: None,
) -> dict[str, Answer]:
    """The answers with nothing cached, from the device, from the cache server, and from its disk.

    `and_then` is called after each of them, while the deployment runs.
    """
    answers: dict[str, Answer] = {}
    deployment = Deployment(file, url=url, log=log)

    def measure(what: str) -> None:
        ask(url, model, _WARM_UP)  # a process's first request pays for more than its prompt
        answers[what] = ask(url, model, document)
        _say(what, answers[what], answers["cold"])
        and_then()

    with deployment:
        measure("cold")
        measure("asked again")
        print("  ... restarting the engine", flush=True)
        deployment.restart_engines()
        measure("engine restarted")
        print("  ... restarting everything", flush=True)
        deployment.restart_everything()
        measure("all restarted")
    return answers


def figures_of(answers: dict[str, Answer]) -> dict[str, float]:
    """TTFT with nothing cached over TTFT of each hit."""
    cold_s = answers["cold"].ttft_s
    return {
        "device_hit_x": cold_s / answers["asked again"].ttft_s,
        "server_hit_x": cold_s / answers["engine restarted"].ttft_s,
        "disk_hit_x": cold_s / answers["all restarted"].ttft_s,
    }


def chart(answers: dict[str, Answer]) -> str:
    slowest_s = max(answer.ttft_s for answer in answers.values())
    lines = []
    for what, answer in answers.items():
        bar = "█" * max(1, round(_BAR_CHARACTERS * answer.ttft_s / slowest_s))
        lines.append(f"  {what:18} {bar} {1000 * answer.ttft_s:.0f} ms")
    return "\n".join(lines)


def _say(what: str, answer: Answer, cold: Answer) -> None:
    gain = "" if answer is cold else f", {cold.ttft_s / answer.ttft_s:.0f} times faster"
    print(f"  {what:18} {answer.ttft_s:8.3f} s   {answer.sources}{gain}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="village", help="as the deployment calls it [village]")
    parser.add_argument("--filename", type=Path, default=Path("dummy.txt"))
    parser.add_argument("--url", type=base_url, default=DEFAULT_URL, help=f"the OpenAI API's address [{DEFAULT_URL}]")
    parser.add_argument("--deploy", type=Path, help="start, restart and stop this deployment")
    parser.add_argument("--log", type=Path, help="a file for the deployment's log [the terminal]")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    arguments = parser.parse_args()
    document = arguments.filename.read_text(encoding="utf-8")
    if arguments.deploy is None:
        answers = {"TTFT": ask(arguments.url, arguments.model, document)}
        _say("TTFT", answers["TTFT"], answers["TTFT"])
        figures: dict[str, float] = {}
    else:
        with arguments.log.open("w") if arguments.log else nullcontext() as log:
            answers = tell_story(arguments.deploy, url=arguments.url, model=arguments.model, document=document, log=log)
        figures = figures_of(answers)
        print(f"\n{chart(answers)}")
        if len({answer.text for answer in answers.values()}) != 1:
            print("the answers differ: this is a bug", file=sys.stderr)
            return 1
    rows: list[dict[str, object]] = [
        {"what": what, "ttft_s": one.ttft_s, "prompt_tokens": one.prompt_tokens, "cached": one.cached}
        for what, one in answers.items()
    ]
    deployment = "" if arguments.deploy is None else arguments.deploy.read_text()
    settings = {"model": arguments.model, "deployment": deployment}
    Result("use_remote_KV_cache.speed_test", settings, rows, figures).write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
