"""A deployment asked about one long document: with nothing cached, again, after a restart of the engine, and of all.

    python -m benchmarks.use_remote_KV_cache.speed_test [--quick] [--json FILE]

`examples.use_remote_KV_cache.speed_test` on a deployment that this program makes: on a GPU glm-4-9b in fp8 with random
weights, 10.5 GiB of KV on the GPU, 20 GiB of host memory, a cache server with 20 GiB and a disk, and a document of
100,000 tokens. On a CPU a small model. Seconds to the first token, and the document's size on disk.
"""

from __future__ import annotations

import sys

from benchmarks.harness import Result, console, print_figures, print_table
from benchmarks.use_remote_KV_cache.stand import example, make_parser, parse_options
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.speed_test import figures_of, tell_story


def main() -> int:
    arguments, settings = parse_options(make_parser(__doc__ or ""))
    result = Result("use_remote_KV_cache.speed_test", settings)
    with example(arguments) as it:
        with it.log.open("w") as log:
            try:
                answers = tell_story(
                    it.file, url=it.url, model=it.model, document=it.document[: it.num_tokens], log=log
                )
            except RuntimeError:
                console.print(it.log.read_text()[-4000:], markup=False)
                raise
        disk_bytes = it.disk_bytes()
        deployment = it.file.read_text()
    cold_s = answers["cold"].ttft_s
    for what, one in answers.items():
        result.rows.append(
            {
                "what": what,
                "ttft_s": round(one.ttft_s, 4),
                "times faster": round(cold_s / one.ttft_s, 1),
                "prompt_tokens": one.prompt_tokens,
                "cached": one.cached,
            }
        )
    result.settings = {**settings, "model": it.model, "deployment": deployment, "disk_bytes": disk_bytes}
    result.figures.update(figures_of(answers))
    result.figures["disk_gib"] = disk_bytes / (1 << 30)
    print_table("time to the first token", result.rows)
    print_figures(result.figures, {})
    result.write(arguments.json)
    if len({answer.text for answer in answers.values()}) != 1:
        console.print("the answers differ")
        return 0 if arguments.device == "cuda" else 1  # random weights have close calls in few bits
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
