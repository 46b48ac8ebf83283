"""A trace of swapping out: blocks go to host memory while the next ones are computed.

    python -m benchmarks.offloading_KV_cache.profiler.swap_out [--quick] [--trace FILE.json] [--json FILE]

4 prompts of 2048 new tokens, 1024 a step, 16 tokens out; less on a CPU, where the trace shows the threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Result
from benchmarks.offloading_KV_cache.profiler.stand import make_profile_parser, open_profiled, size_of
from benchmarks.offloading_KV_cache.profiler.tracing import report, trace
from benchmarks.prefix_caching.engine_stand import PromptMaker, Variant
from benchmarks.prefix_caching.options import parse
from benchmarks.tier_stand import DEVICE_ON, expect_hits, settings_of, warm_up


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(make_profile_parser(__doc__ or "", "swap_out"), argv)
    size = size_of(arguments)
    result = Result("offloading_KV_cache.profiler.swap_out", settings_of(arguments, size))
    with open_profiled(arguments, size) as stand:
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, size.prompts, size.input_tokens)
        prompts = maker.make(size.prompts, size.input_tokens)
        stand.use(Variant(DEVICE_ON))

        def act() -> None:
            expect_hits(stand.run(prompts, size.output_tokens), (), 0.0, "new prompts")
            stand.settle()

        events = trace(act, arguments.trace, arguments.device)
        block_bytes = stand.llm.engine.arena.layout.block_bytes
    report(events, "store", block_bytes, arguments.device, arguments.trace, result)
    result.write(arguments.json)


if __name__ == "__main__":
    main()
