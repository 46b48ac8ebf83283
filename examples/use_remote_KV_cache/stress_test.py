"""More long documents than each tier has room for: round i asks about documents 1 to i, the last of them new.

    python -m examples.use_remote_KV_cache.stress_test --model MODEL --length 100000 --filename dummy.txt --n 6

Prints the triangle of times to the first token: one row per round, one column per document. By default, the model is
that of README's deployment, examples/model.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from benchmarks.harness import Result
from examples.use_remote_KV_cache.asking import DEFAULT_URL, Answer, Refused, ask
from examples.use_remote_KV_cache.command import base_url, run_command

_SHADES = "▁▂▃▄▅▆▇█"
_TITLE_CHARACTERS = 64
_SAMPLE_CHARACTERS = 8000
_SHARE = 0.9
"""A text with a smaller share of the requested tokens is too short; token counts here are estimates."""


def run(url: str, model: str, documents: list[str]) -> list[list[Answer]]:
    """Row by row; each is printed as soon as it is complete."""
    rows: list[list[Answer]] = []
    print(f"| n | {' | '.join(f'{number:6}' for number in range(1, len(documents) + 1))} |")
    print(f"|---|{'|'.join('--------' for _ in documents)}|")
    for last in range(1, len(documents) + 1):
        row = [ask(url, model, document) for document in documents[:last]]
        rows.append(row)
        cells = [f"{answer.ttft_s:6.2f}" for answer in row] + ["      "] * (len(documents) - last)
        print(f"| {last} | {' | '.join(cells)} |", flush=True)
    return rows


def plot(rows: list[list[Answer]]) -> str:
    """One character per request, its height the logarithm of the time."""
    times = [answer.ttft_s for row in rows for answer in row]
    low, high = math.log(min(times)), math.log(max(times))
    span = max(high - low, 1e-9)

    def shade(seconds: float) -> str:
        return _SHADES[round((math.log(seconds) - low) / span * (len(_SHADES) - 1))]

    lines = [f"  round {number}  {' '.join(shade(one.ttft_s) for one in row)}" for number, row in enumerate(rows, 1)]
    return "\n".join([*lines, f"  ▁ {min(times):.3f} s   █ {max(times):.3f} s, logarithmic"])


def by_source(rows: list[list[Answer]]) -> str:
    """Times by the tier that most of the prompt came from."""
    times: dict[str, list[float]] = {}
    for row in rows:
        for answer in row:
            source = max(answer.cached, key=lambda tier: answer.cached[tier]) if answer.cached else "computed"
            times.setdefault(source, []).append(answer.ttft_s)
    return "\n".join(
        f"  {source:10} {len(found):3} times, {min(found):7.3f} to {max(found):7.3f} s"
        for source, found in times.items()
    )


def cut(text: str, num_tokens: int, *, url: str, model: str) -> str:
    """About the first `num_tokens` tokens of `text`. The length of a token is estimated by asking about a sample.

    Raises `Refused` if the text is shorter.
    """
    sample = text[:_SAMPLE_CHARACTERS]
    sample_tokens = ask(url, model, sample, max_tokens=1).prompt_tokens
    if not sample_tokens:
        raise Refused(f"{url} does not say how many tokens a prompt has")
    characters_per_token = max(1, len(sample)) / sample_tokens
    there = round(len(text) / characters_per_token)
    if there < _SHARE * num_tokens:
        raise Refused(f"the document has about {there} tokens: make a longer one with make_dummy_inputs")
    return text[: round(num_tokens * characters_per_token)]


def make_documents(text: str, count: int) -> list[str]:
    """As long as `text`, and different from the first token on."""
    titles = [f"Document {number}. ".ljust(_TITLE_CHARACTERS, "*") for number in range(1, count + 1)]
    return [f"{number} {title}\n{text}" for number, title in enumerate(titles, 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="village", help="as the deployment calls it [village]")
    parser.add_argument("--length", type=int, help="cut the document to about this many tokens [no cut]")
    parser.add_argument("--filename", type=Path, default=Path("dummy.txt"))
    parser.add_argument("--n", type=int, default=6, help="documents")
    parser.add_argument("--url", type=base_url, default=DEFAULT_URL, help=f"the OpenAI API's address [{DEFAULT_URL}]")
    parser.add_argument("--json", metavar="FILE", help="write the triangle there")
    arguments = parser.parse_args()
    if arguments.n <= 0:
        parser.error(f"--n must be positive, not {arguments.n}")
    if arguments.length is not None and arguments.length <= 0:
        parser.error(f"--length must be positive, not {arguments.length}")
    text = arguments.filename.read_text(encoding="utf-8")
    if arguments.length is not None:
        text = cut(text, arguments.length, url=arguments.url, model=arguments.model)
    rows = run(arguments.url, arguments.model, make_documents(text, arguments.n))
    print(f"\n{plot(rows)}\n\n{by_source(rows)}")
    cells: list[dict[str, object]] = [
        {"round": number, "document": place, "ttft_s": one.ttft_s, "cached": one.cached, "request_id": one.request_id}
        for number, row in enumerate(rows, 1)
        for place, one in enumerate(row, 1)
    ]
    settings = {"model": arguments.model, "n": arguments.n, "prompt_tokens": rows[0][0].prompt_tokens}
    Result("use_remote_KV_cache.stress_test", settings, cells, {}).write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
