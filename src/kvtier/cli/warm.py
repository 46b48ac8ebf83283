"""`kvtier warm`: put documents into the cache of a running deployment, before any request needs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from kvtier.api.prefixes.cache import DISK, MEMORY
from kvtier.cli.running_deployment import (
    PREFIXES,
    Document,
    Running,
    api_key_option,
    one_sentence,
    running_at,
    running_of,
    url_option,
)
from kvtier.durations import parse_duration
from kvtier.errors import ConfigError
from kvtier.observe.printable import printable
from kvtier.sizes import format_size

_MAX_TEXT_BYTES = 64 << 20
_TIERS = {MEMORY: "in memory", DISK: "on disk"}
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("warm", short_help="Put documents into the cache of a running deployment.")
@click.argument("files", nargs=-1, type=_FILE, metavar="[DEPLOYMENT] [DOCUMENTS]...")
@click.option("--name", required=True, help="The prefix's name.")
@click.option("--system", type=_FILE, help="File with the system message before the documents.")
@click.option("--model", default=None, help="What clients call the model.  [default: the only one]")
@click.option("--key", default=None, help="Name of the API key whose chats begin so.  [default: the admin's]")
@click.option("--pin", is_flag=True, help="Keep it from eviction.")
@click.option("--ttl", default=None, help="How long the name and the pin last, as in 7d or 12h.")
@click.option("--force", is_flag=True, help="Warm even if blocks left by requests are evicted for it.")
@url_option
@api_key_option
def warm(
    files: tuple[Path, ...],
    name: str,
    system: Path | None,
    model: str | None,
    key: str | None,
    pin: bool,
    ttl: str | None,
    force: bool,
    url: str | None,
    api_key_file: Path | None,
) -> None:
    """Put DOCUMENTS, files of text, into the cache of the running DEPLOYMENT, as the beginning of a chat.

    DEPLOYMENT is its file. With --url there is none, and all files are documents.

    A chat whose first message begins with the documents (and with that system message, if one is given) then finds all
    of them in the cache; so does one that says "prefix": NAME. What is absent is computed beside the traffic, which
    comes first.

        kvtier warm deploy.yml --name handbook docs/*.md --system prompt.txt --pin --ttl 7d
    """
    with one_sentence():
        running, documents = _split(files, url, api_key_file)
        body: Document = {
            "name": name,
            "documents": [_read(path) for path in documents],
            "system": None if system is None else _read(system),
            "model": model,
            "key": key,
            "pin": pin,
            "ttl_s": None if ttl is None else parse_duration(ttl),
            "force": force,
        }
        prefix = _follow(running.events(PREFIXES, body), name)
        kept = _where(prefix.get("bytes_by_tier"))
        owner = f", for chats of the API key {printable(str(prefix['key']), 40)}" if prefix.get("key") else ""
        blocks = f"{prefix.get('blocks')} blocks{owner}{kept}"
        click.echo(f"{name}: {prefix.get('tokens')} tokens of {prefix.get('model')} in {blocks}")


def _split(files: tuple[Path, ...], url: str | None, api_key_file: Path | None) -> tuple[Running, tuple[Path, ...]]:
    """The deployment, and the documents for it."""
    if url is not None:
        return running_at(url, api_key_file), files
    if api_key_file is not None:
        raise ConfigError("--api-key-file is for --url: the file of a deployment has its keys")
    if not files:
        raise ConfigError("say which deployment: give its file first, or --url")
    return running_of(files[0]), files[1:]


def _follow(events: Iterator[Document], name: str) -> Document:
    """Show the progress. Raises `ConfigError` if it fails."""
    prefix: Document | None = None
    with click.progressbar(length=1, label=printable(name, 40), file=sys.stderr, width=30) as bar:
        for event in events:
            if "prefix" in event:
                prefix = event["prefix"]
                break
            if event.get("all_tokens"):
                bar.length = event["all_tokens"]
                bar.update(event["done_tokens"] - bar.pos)
        if prefix is not None:
            bar.update((bar.length or 0) - bar.pos)
    if prefix is None:
        raise ConfigError("the server stopped before it was done: what was computed stays cached")
    return prefix


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEXT_BYTES + 1)
        if len(data) > _MAX_TEXT_BYTES:
            raise ConfigError(f"{path} is larger than {format_size(_MAX_TEXT_BYTES)}")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8") from error


def _where(tiers: object) -> str:
    if not isinstance(tiers, dict) or not tiers:
        return ""
    return ": " + ", ".join(f"{format_size(int(nbytes))} {_TIERS.get(tier, tier)}" for tier, nbytes in tiers.items())
