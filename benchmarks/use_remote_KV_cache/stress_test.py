"""More long documents than each tier has room for: the triangle of times to the first token, and the disk's use.

    python -m benchmarks.use_remote_KV_cache.stress_test [--quick] [--n 6] [--json FILE]

`examples.use_remote_KV_cache.stress_test` on the deployment that `benchmarks.use_remote_KV_cache.speed_test` describes:
round i asks about documents 1 to i, the last of them new.
"""

from __future__ import annotations

import sys

from benchmarks.harness import Result, console
from benchmarks.use_remote_KV_cache.stand import example, make_parser, parse_options
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.deployment import Deployment
from examples.use_remote_KV_cache.stress_test import by_source, cut, make_documents, plot, run


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--n", type=int, help="documents (6; 3 with --quick)")
    arguments, settings = parse_options(parser)
    count = arguments.n or (3 if arguments.quick else 6)
    result = Result("use_remote_KV_cache.stress_test", settings)
    with example(arguments) as it:
        with it.log.open("w") as log:
            try:
                with Deployment(it.file, url=it.url, log=log):
                    text = cut(it.document, it.num_tokens, url=it.url, model=it.model)
                    rows = run(it.url, it.model, make_documents(text, count))
            except RuntimeError:
                console.print(it.log.read_text()[-4000:], markup=False)
                raise
        disk_bytes = it.disk_bytes()
        deployment = it.file.read_text()
    print(f"\n{plot(rows)}\n\n{by_source(rows)}\n\n{disk_bytes / (1 << 30):.1f} GiB on disk", file=sys.stderr)
    for number, row in enumerate(rows, 1):
        for place, one in enumerate(row, 1):
            cell = {"round": number, "document": place, "ttft_s": round(one.ttft_s, 4), "cached": one.cached}
            result.rows.append(cell)
    result.settings = {
        **settings,
        "model": it.model,
        "n": count,
        "prompt_tokens": rows[0][0].prompt_tokens,
        "deployment": deployment,
        "disk_bytes": disk_bytes,
    }
    result.figures["disk_gib"] = disk_bytes / (1 << 30)
    result.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
