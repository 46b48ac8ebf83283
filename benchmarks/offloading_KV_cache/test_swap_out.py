"""Swapping out: how many requests per second does storing full blocks in host memory cost?

    python -m benchmarks.offloading_KV_cache.test_swap_out [--quick] [--json FILE] [--plot FILE.png]

4 prompts of 8192 new tokens, one token out, over the tokens that a step computes at most, sync and async-2, with the
device's cache on and off; less on a CPU. QPS with `swap_space` over QPS without, as `benchmarks/store_cost.py` measures
it. Each cell ends with a check: everything stored is loaded and gives the same answers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.store_cost import GPU_SHAPE, figure_name, run
from benchmarks.tier_stand import host_tiers, make_tier_parser


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        make_tier_parser(__doc__ or "", GPU_SHAPE),
        argv,
        "offloading_KV_cache.test_swap_out",
        lambda arguments: figure_name("swap_out_qps", arguments),
        lambda arguments: host_tiers,
    )


if __name__ == "__main__":
    sys.exit(main())
