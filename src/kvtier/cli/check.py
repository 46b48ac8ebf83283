"""`kvtier check`: what a deployment file would use, and what keeps it from starting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from kvtier.deploy.check.machine import this_machine
from kvtier.deploy.check.report import CacheUse, CheckReport, EngineUse, check_plan
from kvtier.deploy.plan.deployment import load_plan
from kvtier.errors import ConfigError
from kvtier.sizes import format_size

_RUNTIME_FOLDER = Path("RUNTIME")
"""Placeholder for the folder that a deployment makes for its sockets when it starts."""


@click.command("check", short_help="Report what a deployment would use, and what is wrong.")
@click.argument("deployment", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_command(deployment: Path, as_json: bool) -> None:
    """Report what DEPLOYMENT would use of this machine, and what keeps it from starting.

    Nothing is started, created or changed. The exit status is 0 if it would start:

        kvtier check deploy.yml && kvtier serve deploy.yml
    """
    try:
        report = check_plan(load_plan(deployment, _RUNTIME_FOLDER), this_machine(), _RUNTIME_FOLDER)
    except ConfigError as error:
        if not as_json:
            raise click.ClickException(str(error)) from error
        click.echo(msgspec.json.encode({"problems": str(error).splitlines()}).decode())
        raise click.exceptions.Exit(1) from error
    click.echo(msgspec.json.encode(report).decode() if as_json else _text(report))
    if report.problems:
        raise click.exceptions.Exit(1)


def _text(report: CheckReport) -> str:
    lines: list[str] = []
    if report.caches:
        lines += _table(("cache", "memory", "disk", "folder", "listens on"), [_cache_row(one) for one in report.caches])
        lines.append("")
    lines += _table(
        ("engine", "device", "architecture", "weights", "KV per token", "KV space", "swap", "model"),
        [_engine_row(one) for one in report.engines],
    )
    lines.append("")
    addresses = [(one.api, f"{report.scheme}://{_host(one.host)}:{one.port}") for one in report.listeners]
    lines += _table(("API", "address"), addresses)
    lines.append("")
    lines.append(f"memory  {format_size(report.host_bytes)} of {format_size(report.machine_bytes)}")
    if report.disk_bytes:
        lines.append(f"disk    up to {format_size(report.disk_bytes)}")
    lines += [f"note: {note}" for note in report.notes]
    lines.append("")
    if report.problems:
        lines += [f"problem: {problem}" for problem in report.problems]
    else:
        lines.append("it would start")
    return "\n".join(lines)


def _cache_row(cache: CacheUse) -> tuple[str, ...]:
    places = [f"unix:{cache.socket}"]
    places += [f"tcp://{cache.tcp}"] if cache.tcp else []
    places += [f"http://{cache.metrics}/metrics"] if cache.metrics else []
    disk = f"{format_size(cache.disk_bytes)} ({_size(cache.disk_free_bytes)} free)" if cache.disk_bytes else "-"
    return cache.name, format_size(cache.memory_bytes), disk, cache.folder or "-", " ".join(places)


def _engine_row(engine: EngineUse) -> tuple[str, ...]:
    is_gpu = engine.device != "cpu"
    return (
        engine.name,
        f"{engine.device} ({engine.share:.0%})" if is_gpu and engine.share else engine.device,
        engine.architecture or "-",
        _size(engine.weights_bytes),
        _size(engine.kv_token_bytes),
        _size(engine.kv_cache_bytes) if engine.kv_cache_bytes or not is_gpu else "what is left",
        _size(engine.swap_bytes or None),
        engine.model,
    )


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_size(nbytes)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]
