"""`kvtier prefix`: inspect and manage the named prefixes of a running deployment."""

from __future__ import annotations

import time
from collections.abc import Callable

import click
import msgspec

from kvtier.cli.running_deployment import PREFIXES, Document, Running, deployment_options, path_of
from kvtier.observe.printable import printable
from kvtier.sizes import format_size

_LIMIT = 1000
_HEADS = ("name", "model", "key", "tokens", "blocks", "in memory", "on disk", "pinned", "hits", "last used", "expires")


@click.group("prefix", short_help="Inspect and manage prefixes with names.")
def prefix() -> None:
    """Inspect and manage the named prefixes of a running deployment; `kvtier warm` makes them."""


@prefix.command("ls")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@deployment_options
def list_prefixes(find: Callable[[], Running], as_json: bool) -> None:
    """List the prefixes, and what else is cached in each namespace."""
    document = find().get(f"{PREFIXES}?limit={_LIMIT}")
    if as_json:
        click.echo(msgspec.json.encode(document).decode())
        return
    rows = [_HEADS, *(_row(one) for one in document.get("prefixes", []))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if document.get("is_cut"):
        click.echo(f"there are more than {_LIMIT}")


@prefix.command()
@click.argument("name")
@deployment_options
def pin(find: Callable[[], Running], name: str) -> None:
    """Keep the blocks of NAME from eviction."""
    kept = find().post(path_of(name, "pin")).get("prefix", {})
    if kept.get("is_pinned"):
        click.echo(f"{name} is pinned")
    else:
        count = f"{kept.get('pinned_blocks')} of {kept.get('blocks')} blocks"
        click.echo(f"{name} is pinned in part: {count}, for the others are not cached; warm it again")


@prefix.command()
@click.argument("name")
@deployment_options
def unpin(find: Callable[[], Running], name: str) -> None:
    """Let the blocks of NAME be evicted like others."""
    find().post(path_of(name, "unpin"))
    click.echo(f"{name} is no longer pinned")


@prefix.command(short_help="Drop a prefix and its blocks.")
@click.argument("name")
@deployment_options
def drop(find: Callable[[], Running], name: str) -> None:
    """Drop NAME and its blocks, except those that other prefixes begin with."""
    count = find().post(path_of(name, "drop")).get("dropped_blocks")
    click.echo(f"{name} is gone, with {count} blocks")


@prefix.command()
@click.argument("name")
@click.argument("new_name")
@deployment_options
def rename(find: Callable[[], Running], name: str, new_name: str) -> None:
    """Rename NAME to NEW_NAME."""
    find().post(path_of(name, "rename"), {"name": new_name})
    click.echo(f"{name} is called {new_name} now")


def _row(one: Document) -> tuple[str, ...]:
    tiers = one.get("bytes_by_tier") or {}
    return (
        printable(one["name"] or "(all)"),
        printable(str(one["model"]), 40),
        printable(str(one.get("key") or "-"), 40),
        str(one["tokens"]),
        str(one["blocks"]),
        format_size(tiers["server"]) if "server" in tiers else "-",
        format_size(tiers["disk"]) if "disk" in tiers else "-",
        _pinned(one),
        "-" if one["hits"] is None else str(one["hits"]),
        _when(one["last_used"]),
        _when(one["expires_at"]),
    )


def _pinned(one: Document) -> str:
    """What the cache keeps: possibly less than was pinned, or blocks in common with another prefix."""
    if one["is_pinned"]:
        return "yes"
    return f"{one['pinned_blocks']} blocks" if one.get("pinned_blocks") else "-"


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
