"""`kvtier pack`: the blocks of a prefix as a file, from one deployment to another."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from kvtier.api.prefixes.record import NAME_IN_WORDS, PrefixText, is_name
from kvtier.blocks.hashing import split_hashes
from kvtier.cli.connection_options import ConnectionOptions, connection_options
from kvtier.cli.running_deployment import Document, Running, deployment_options, path_of
from kvtier.client.client import CacheClient
from kvtier.client.known_namespace import KnownNamespace
from kvtier.errors import ConfigError, KvtierError
from kvtier.observe.printable import printable
from kvtier.packs.form import PackHeader, PackReader, PackWriter, read_sign_key, section_blocks_of
from kvtier.packs.moving import check_namespace, check_room, export_blocks, import_blocks
from kvtier.sizes import format_size

_TIMEOUT_S = 60.0
_LONGEST = 2000
_CACHES = "/kvtier/v1/caches"
_KEY = click.option(
    "--sign-key",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with a key (16 bytes or more) that signs the pack; importing it needs the same key.",
)
_PACK = click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))


@click.group("pack", short_help="Carry the blocks of a prefix to another deployment.")
def pack() -> None:
    """Carry the blocks of a named prefix to another deployment of the same model, as a file."""


@pack.command("export", short_help="Write the blocks of a prefix into a file.")
@click.argument("name")
@_PACK
@click.option("--with-text", is_flag=True, help="Include the documents, so that requests can name the prefix there.")
@_KEY
@connection_options
@deployment_options
def export_pack(
    find: Callable[[], Running], reach: ConnectionOptions, name: str, file: Path, with_text: bool, sign_key: Path | None
) -> None:
    """Write the blocks of the prefix NAME into FILE; - is standard output."""
    with _one_sentence():
        key = read_sign_key(sign_key)
        shown = find().get(path_of(name) + ("?text=true" if with_text else ""))
        hashes = split_hashes(bytes.fromhex(shown["hashes"]))
        prefix = shown["prefix"]
        reach = _with_server(reach, shown["cache"])
        with reach.connect(_TIMEOUT_S) as client:
            known = next((one for one in client.namespaces() if one.digest == prefix["namespace"]), None)
        if known is None:
            raise ConfigError(f"the cache no longer has blocks of {name}: warm it again")
        text = msgspec.json.encode(shown["text"]) if with_text and shown["text"] is not None else b""
        header = PackHeader(
            name=name,
            model=prefix["model"],
            namespace=known.digest,
            root=shown["root"],
            fields=known.fields,
            block_bytes=known.block_bytes,
            block_tokens=known.block_tokens,
            num_blocks=len(hashes),
            section_blocks=section_blocks_of(known.block_bytes),
            tokens=prefix["tokens"],
            text_bytes=len(text),
            is_signed=key is not None,
        )
        with _written(file) as out, _opened(reach, known) as client, _bar(len(hashes), name) as advance:
            export_blocks(client, PackWriter(out, header, hashes, text, key), header, hashes, advance)
        size = format_size(len(hashes) * known.block_bytes)
        click.echo(f"{name}: {len(hashes)} blocks, {size}, {'signed' if key else 'not signed'}", err=True)


@pack.command("import", short_help="Put the blocks of a file into a deployment's cache.")
@_PACK
@click.option("--name", default=None, help="Its name here.  [default: as in the pack]")
@click.option("--pin", is_flag=True, help="Keep it from eviction.")
@click.option("--force", is_flag=True, help="Import it even if other blocks are evicted for it.")
@_KEY
@connection_options
@deployment_options
@click.pass_context
def import_pack(
    context: click.Context,
    find: Callable[[], Running],
    reach: ConnectionOptions,
    file: Path,
    name: str | None,
    pin: bool,
    force: bool,
    sign_key: Path | None,
) -> None:
    """Put the blocks in FILE (- is standard input) into the cache of a running deployment, under their name.

    If the deployment refuses the name, the blocks are removed again.

    Only where the namespace, and with it the weights, is the same; else it says what differs. With --server, and
    neither --deployment nor --url, the blocks go into that cache server without a name.
    """
    with _one_sentence(), _read(file) as source:
        reader = PackReader(source, _called(file), read_sign_key(sign_key))
        header = reader.header
        is_nameless = (
            reach.server is not None and not context.params.get("deployment") and not context.params.get("url")
        )
        running, served = (None, None) if is_nameless else _served(find(), header)
        if served is not None:
            reach = _with_server(reach, served["address"])
        with reach.connect(_TIMEOUT_S) as client:
            known = check_namespace(header, client.namespaces())
        called = ""
        add: Callable[[], object] | None = None
        if running is not None and served is not None:
            called = _checked(header.name if name is None else name)
            add = partial(running.post, path_of(called, "add"), _addition(reader, file, served["model"], pin=pin))
        with _opened(reach, known) as client:
            if not force:
                check_room(client, reader)
            with _bar(header.num_blocks, header.name) as advance:
                count = import_blocks(client, reader, advance, add)
        click.echo(f"{called or 'without a name'}: {header.num_blocks} blocks, {count} of them new to the cache")


@pack.command("inspect")
@_PACK
@click.option("--verify", is_flag=True, help="Read all of it, and compare every block with its checksum.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@_KEY
def inspect_pack(file: Path, verify: bool, as_json: bool, sign_key: Path | None) -> None:
    """Show the contents of FILE."""
    with _one_sentence(), _read(file) as source:
        reader = PackReader(source, _called(file), read_sign_key(sign_key))
        header = reader.header
        if verify:
            with _bar(header.num_blocks, header.name) as advance:
                for section in reader.sections():
                    advance(section.count)
        if as_json:
            click.echo(msgspec.json.encode(header).decode())
            return
        for title, value in _facts(header, verify=verify):
            click.echo(f"{title:10} {value}")


def _facts(header: PackHeader, *, verify: bool) -> list[tuple[str, str]]:
    size = format_size(header.num_blocks * header.block_bytes)
    weights = (header.fields or {}).get("weights")
    return [
        ("name", printable(header.name)),
        ("model", printable(header.model)),
        ("namespace", header.namespace),
        ("weights", printable(str(weights)) if weights else "not known"),
        ("tokens", str(header.tokens)),
        ("blocks", f"{header.num_blocks} of {header.block_tokens} tokens, {size}"),
        ("text", format_size(header.text_bytes) if header.text_bytes else "none"),
        ("signed", "yes" if header.is_signed else "no"),
        ("whole", "yes" if verify else "not looked at: --verify"),
    ]


def _served(running: Running, header: PackHeader) -> tuple[Running, Document]:
    """The deployment's model with the pack's namespace or, if there is none, its name; of several, one with both.

    Raises `ConfigError` for a deployment without a cache.
    """
    served: list[Document] = running.get(_CACHES).get("caches", [])
    if not served:
        raise ConfigError("the deployment has no cache: give it one")
    found = [one for one in served if one["namespace"] == header.namespace] or served
    named = [one for one in found if one["model"] == header.model]
    return running, (named or found)[0]


def _called(file: Path) -> str:
    return "standard input" if str(file) == "-" else str(file)


def _checked(name: str) -> str:
    if not is_name(name):
        raise ConfigError(f"the prefix cannot be called {printable(name)!r}: give it a --name of {NAME_IN_WORDS}")
    return name


def _addition(reader: PackReader, file: Path, model: str, *, pin: bool) -> Document:
    header = reader.header
    return {
        "model": model,
        "namespace": header.namespace,
        "root": header.root,
        "hashes": b"".join(reader.hashes).hex(),
        "tokens": header.tokens,
        "text": _text_of(reader, file) if reader.text else None,
        "pin": pin,
    }


def _text_of(reader: PackReader, file: Path) -> PrefixText:
    """Raises `ConfigError` for a text that `pack export` has not written."""
    try:
        return msgspec.json.decode(reader.text, type=PrefixText)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{printable(_called(file))} is damaged: its text cannot be read: {error}") from error


def _with_server(reach: ConnectionOptions, address: str) -> ConnectionOptions:
    """The given server, or else the deployment's."""
    if reach.server is not None:
        return reach
    given = {name: getattr(reach, name) for name in ConnectionOptions.__dataclass_fields__}
    return ConnectionOptions(**{**given, "server": address})


def _opened(reach: ConnectionOptions, known: KnownNamespace) -> CacheClient:
    return reach.connect(_TIMEOUT_S, known.any_layout, known.namespace, known.name)


@contextlib.contextmanager
def _bar(length: int, label: str) -> Iterator[Callable[[int], None]]:
    with click.progressbar(length=length, label=printable(label, 40), file=sys.stderr, width=30) as bar:
        yield lambda count: bar.update(count)


@contextlib.contextmanager
def _read(path: Path) -> Iterator[Any]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    with path.open("rb", buffering=0) as file:
        yield file


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Any]:
    """A file that gets its name once it is complete; an incomplete one is removed. A pipe or device is written to."""
    if str(path) == "-":
        if sys.stdout.isatty():
            raise ConfigError("a pack is not for a terminal: give a file, or redirect the output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    beside = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            with path.open("wb", buffering=0) as file:
                yield file
            return
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"{printable(str(path))} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except KvtierError as error:
        raise click.ClickException(printable(str(error), _LONGEST)) from error
    except OSError as error:
        where = printable(str(error.filename)) if error.filename else "the pack"
        raise click.ClickException(f"{where}: {error.strerror or error}") from error
