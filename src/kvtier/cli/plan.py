"""`kvtier plan`: the effect of memory and disk of each size, for a trace or for a server's own traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from kvtier.blocks.eviction import Eviction
from kvtier.cli.connection_options import ConnectionOptions, connection_options
from kvtier.cli.size_parameter import SizeParameter
from kvtier.errors import ConfigError, KvtierError
from kvtier.observe.printable import printable
from kvtier.planning.live import plan_live, read_curve
from kvtier.planning.page import page_of
from kvtier.planning.picture import draw_png
from kvtier.planning.plan import Plan, plan_trace
from kvtier.planning.terminal import lines_of
from kvtier.simulate.costs import Costs
from kvtier.simulate.shapes import GPUS, SHAPE_NAMES, shape_of
from kvtier.simulate.tiers import TieredReplay, TierSettings, replay_tiers
from kvtier.simulate.trace import TracedRequest, read_traces

_TIMEOUT_S = 30.0
_LONGEST = 2000
_MAX_BLOCKS = 100_000_000
_GPU_NAMES = [gpu.name for gpu in GPUS.values()]


@click.command("plan", short_help="What more memory or disk would do.")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False, exists=True), required=False)
@click.option(
    "--model", "shape", required=True, metavar="SHAPE", help=f"{', '.join(SHAPE_NAMES)}, a config.json, or its folder."
)
@click.option("--gpu", type=click.Choice(_GPU_NAMES, case_sensitive=False), default="H200", show_default=True)
@click.option("--kv-dtype", help="Of the cache: bfloat16, float16, float32 or fp8.  [default: the model's]")
@click.option("--prefill-speed", type=click.FloatRange(min=1), metavar="TOKENS/S", help="Measured, if you have it.")
@click.option("--disk-speed", type=SizeParameter(), default="5GiB", show_default=True, help="Bytes a second.")
@click.option("--block-tokens", type=click.IntRange(1, 1 << 20), help="Of the trace.  [default: as its lengths say]")
@click.option("--memory", type=SizeParameter(), help="What there is now, for a trace.")
@click.option("--disk", type=SizeParameter(), help="What there is now, for a trace.")
@click.option(
    "--eviction",
    type=click.Choice(get_args(Eviction)),
    help="What the deployment runs, for a trace: the advice is for that.  [default: adaptive]",
)
@click.option(
    "--simulate/--no-simulate", "simulates", default=True, help="Replay a trace through the adaptive policy, too."
)
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a self-contained page.")
@click.option("--png", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw with matplotlib.")
@connection_options
def plan_command(
    trace: Path | None,
    shape: str,
    gpu: str,
    kv_dtype: str | None,
    prefill_speed: float | None,
    disk_speed: int,
    block_tokens: int | None,
    memory: int | None,
    disk: int | None,
    eviction: Eviction | None,
    simulates: bool,
    page: Path | None,
    picture: Path | None,
    reach: ConnectionOptions,
) -> None:
    """Hit rate, time to first token and GPU time saved over sizes of memory and disk, and what to buy.

    For TRACE, a file as `kvtier trace` writes it; or without one for the traffic that a running cache server has seen
    (--server, or the one that runs here).
    """
    try:
        costs = Costs(shape_of(shape, kv_dtype), GPUS[gpu.lower()], float(disk_speed), prefill_speed)
        if trace is None:
            if memory is not None or disk is not None or eviction is not None:
                raise ConfigError(
                    "a server reports its own sizes and policy: --memory, --disk and --eviction are for a trace"
                )
            plan = _plan_of_server(reach, costs)
        else:
            if reach.server is not None:
                raise ConfigError("give a trace or --server, not both")
            plan = plan_trace(
                _read(trace),
                costs,
                name=printable(trace.name),
                block_tokens=block_tokens,
                memory_bytes=memory,
                disk_bytes=disk,
                simulate=_told_replay if simulates else None,
                eviction=eviction or "adaptive",
            )
        click.echo("\n".join(lines_of(plan)))
        if page is not None:
            page.write_text(page_of(plan), encoding="utf-8")
        if picture is not None:
            draw_png(plan, picture)
    except (KvtierError, OSError) as error:
        raise click.ClickException(printable(str(error), _LONGEST)) from error


def _told_replay(
    requests: Sequence[TracedRequest], settings: TierSettings, costs: Costs, block_tokens: int
) -> TieredReplay:
    """Shows the size, since each takes seconds."""
    disk = f" above {settings.disk_blocks:,} on disk" if settings.disk_blocks else ""
    click.echo(f"simulating {settings.memory_blocks:,} blocks{disk}", err=True)
    return replay_tiers(requests, settings, costs, block_tokens)


def _read(trace: Path) -> list[TracedRequest]:
    """All of a trace, if its blocks fit into memory."""
    requests = []
    num_blocks = 0
    for request in read_traces(trace):
        requests.append(request)
        num_blocks += len(request.hashes)
        if num_blocks > _MAX_BLOCKS:
            raise ConfigError(f"{trace} has more than {_MAX_BLOCKS:,} blocks: convert it with larger --block-tokens")
    return requests


def _plan_of_server(reach: ConnectionOptions, costs: Costs) -> Plan:
    with reach.connect(_TIMEOUT_S) as client:
        curve = read_curve(client.miss_curve())
    return plan_live(curve, costs, name=reach.address)
