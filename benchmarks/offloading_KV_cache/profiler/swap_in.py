"""A trace of swapping in: prompts are loaded from host memory while another one is computed.

    python -m benchmarks.offloading_KV_cache.profiler.swap_in [--quick] [--trace FILE.json] [--json FILE]

4 prompts of 2048 tokens, 1024 a step, 16 tokens out, with the device's cache off: the first is new and is computed, the
others are in host memory. Less on a CPU, where the trace shows the threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Result
from benchmarks.offloading_KV_cache.profiler.stand import make_profile_parser, open_profiled, size_of
from benchmarks.offloading_KV_cache.profiler.tracing import report, trace
from benchmarks.prefix_caching.engine_stand import PromptMaker, Variant
from benchmarks.prefix_caching.options import parse
from benchmarks.tier_stand import BELOW, DEVICE_OFF, expect_hits, full_share, settings_of, warm_up


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(make_profile_parser(__doc__ or "", "swap_in"), argv)
    size = size_of(arguments)
    result = Result("offloading_KV_cache.profiler.swap_in", settings_of(arguments, size))
    with open_profiled(arguments, size) as stand:
        maker = PromptMaker(stand.vocab_size)
        warm_up(stand, maker, size.prompts, size.input_tokens)
        prompts = maker.make(size.prompts, size.input_tokens)
        stand.use(Variant(DEVICE_OFF))
        stand.run(prompts[1:], 1)
        stand.settle()

        def act() -> None:
            done = stand.run(prompts, size.output_tokens)
            loaded = full_share(size.input_tokens) * (size.prompts - 1) / size.prompts
            expect_hits(done, BELOW, loaded, "prompts that are in host memory, but for one")

        events = trace(act, arguments.trace, arguments.device)
        block_bytes = stand.llm.engine.arena.layout.block_bytes
    report(events, "load", block_bytes, arguments.device, arguments.trace, result)
    result.write(arguments.json)


if __name__ == "__main__":
    main()
