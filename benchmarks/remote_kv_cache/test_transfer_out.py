"""Transferring out: how many requests per second does sending full blocks to a cache server cost?

    python -m benchmarks.remote_kv_cache.test_transfer_out [--quick] [--tcp] [--json FILE] [--plot FILE.png]

4 prompts of 8192 new tokens, one token out, over the tokens that a step computes at most, sync and async-2, with the
device's cache on and off; less on a CPU. QPS with `cache_server` over QPS without any tier, as
`benchmarks/store_cost.py` measures it. The server is a process of its own on this host, reached through shared memory,
or with `--tcp` over a socket. Each cell ends with a check: everything stored is loaded and gives the same answers.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from benchmarks.store_cost import GPU_SHAPE, OpenTiers, figure_name, run
from benchmarks.tier_stand import add_server_options, make_tier_parser, server_tiers


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_tier_parser(__doc__ or "", GPU_SHAPE)
    add_server_options(parser)
    return run(parser, argv, "remote_kv_cache.test_transfer_out", _figure, _tiers_of)


def _figure(arguments: argparse.Namespace) -> str:
    return figure_name("transfer_out_tcp_qps" if arguments.tcp else "transfer_out_qps", arguments)


def _tiers_of(arguments: argparse.Namespace) -> OpenTiers:
    return functools.partial(server_tiers, is_tcp=arguments.tcp, swap_space=arguments.swap_space)


if __name__ == "__main__":
    sys.exit(main())
