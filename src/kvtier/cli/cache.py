"""`kvtier cache`: look at and look after what is cached, in a running server or in a folder at rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import slot_bytes_of
from kvtier.cacheserver.tenants import split_tagged
from kvtier.cli.connection_options import ConnectionOptions, connection_options
from kvtier.client.client import CacheClient
from kvtier.client.known_namespace import KnownNamespace
from kvtier.errors import ConfigError, KvtierError
from kvtier.observe.printable import printable
from kvtier.sizes import format_size
from kvtier.stores.disk import DiskStore
from kvtier.stores.folder import holds_store, space_of
from kvtier.stores.stored_block import StoreSpace
from kvtier.wire.messages import LISTED_DISK, LISTED_MEMORY, LISTED_PINNED

_VERIFY_BLOCKS = 16
_TIMEOUT_S = 30.0
_MIN_DIGEST = 4
_SHOWN_NAME = 96
_LONGEST = 2000


class _Cached(Protocol):
    """One namespace, in a server or a folder."""

    namespace: str
    name: str
    shown_name: str
    block_bytes: int
    num_blocks: int
    num_disk_blocks: int

    def blocks(self) -> list[tuple[BlockHash, int]]: ...

    def verify(self, hashes: Sequence[BlockHash]) -> list[bool]: ...

    def drop(self) -> int: ...

    def pin(self, hashes: Sequence[BlockHash], *, keep: bool) -> int: ...


def _shown_name(tenant: str, name: str) -> str:
    """A namespace's name, as shown to users."""
    return printable(f"{tenant}: {name}" if tenant else name, _SHOWN_NAME)


class _ServerCached:
    def __init__(self, reach: ConnectionOptions, described: KnownNamespace) -> None:
        self._reach = reach
        self.namespace = described.digest
        self.name = described.name
        self.shown_name = _shown_name(described.tenant, described.name)
        self.block_bytes = described.block_bytes
        self._described = described
        self.num_blocks = described.blocks
        self.num_disk_blocks = described.disk_blocks

    def blocks(self) -> list[tuple[BlockHash, int]]:
        with self._connect() as client:
            return client.list_blocks()

    def verify(self, hashes: Sequence[BlockHash]) -> list[bool]:
        with self._connect() as client:
            return client.verify(hashes)

    def drop(self) -> int:
        with self._connect() as client:
            return client.drop()

    def _connect(self) -> CacheClient:
        """Connected only while needed: there may be more namespaces than a server has connections."""
        described = self._described
        return self._reach.connect(_TIMEOUT_S, described.any_layout, described.namespace, self.name)

    def pin(self, hashes: Sequence[BlockHash], *, keep: bool) -> int:
        with self._connect() as client:
            return client.pin(hashes) if keep else client.unpin(hashes)


class _FolderCached:
    def __init__(self, store: DiskStore, space: StoreSpace) -> None:
        self._store = store
        self._space = space
        self.namespace = space.namespace.hex()
        tenant, self.name = split_tagged(space.name)
        self.shown_name = _shown_name(tenant, self.name)
        self.block_bytes = space.block_bytes
        self.num_blocks = 0
        self.num_disk_blocks = len(space.index)

    def blocks(self) -> list[tuple[BlockHash, int]]:
        stored = self._store.blocks(self._space)
        return [(block_hash, LISTED_DISK | (LISTED_PINNED if pinned else 0)) for block_hash, pinned in stored]

    def verify(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [self._store.verify(self._space, block_hash) for block_hash in hashes]

    def drop(self) -> int:
        return self._store.drop(self._space)

    def pin(self, hashes: Sequence[BlockHash], *, keep: bool) -> int:
        act = self._store.pin if keep else self._store.unpin
        return act(self._space, hashes)


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options for where to look."""
    folder = click.option(
        "--folder", type=click.Path(path_type=Path, file_okay=False, exists=True), help="A folder that no server uses."
    )
    return folder(connection_options(command))


@contextlib.contextmanager
def _opened(folder: Path | None, reach: ConnectionOptions) -> Iterator[list[_Cached]]:
    """Every namespace there. One clear sentence for each error."""
    try:
        with contextlib.ExitStack() as stack:
            if folder is not None:
                if reach.server is not None:
                    raise ConfigError("give --folder or --server, not both")
                if not holds_store(folder):
                    raise ConfigError(f"there is no KV cache in {folder}")
                store = stack.enter_context(contextlib.closing(DiskStore(folder, space_of(folder))))
                for kind, count in store.losses.items():
                    click.echo(f"lost: {count} ({kind})", err=True)
                yield [_FolderCached(store, space) for space in store.spaces() if len(space.index)]
                return
            with reach.connect(_TIMEOUT_S) as client:
                described = client.namespaces()
            yield [_ServerCached(reach, space) for space in described]
    except (KvtierError, OSError) as error:
        raise click.ClickException(printable(str(error), _LONGEST)) from error


def _chosen(cached: Sequence[_Cached], wanted: str) -> _Cached:
    """By name, or by the beginning of the namespace."""
    is_digest = len(wanted) >= _MIN_DIGEST
    found = [
        space
        for space in cached
        if (wanted and wanted == space.name) or (is_digest and space.namespace.startswith(wanted))
    ]
    if len(found) != 1:
        known = ", ".join(f"{space.shown_name or 'unnamed'} ({space.namespace[:12]})" for space in cached) or "none"
        which = "no namespace is" if not found else "several namespaces are"
        raise click.ClickException(f"{which} called {printable(repr(wanted))}; there are: {known}")
    return found[0]


def _hashes(cached: _Cached, prefix: str) -> list[BlockHash]:
    return [block_hash for block_hash, _ in cached.blocks() if block_hash.hex().startswith(prefix)]


@click.group("cache", short_help="Inspect and manage cached blocks.")
def cache() -> None:
    """Inspect and manage cached blocks: in a running server, or in a folder that no server uses."""


@cache.command()
@_where
def stat(folder: Path | None, reach: ConnectionOptions) -> None:
    """Show blocks, bytes and hits by namespace."""
    with _opened(folder, reach) as cached:
        click.echo(f"{'namespace':14} {'name':24} {'block':>10} {'in memory':>10} {'on disk':>10} {'disk bytes':>12}")
        for space in cached:
            disk_bytes = format_size(space.num_disk_blocks * slot_bytes_of(space.block_bytes))
            click.echo(
                f"{space.namespace[:12]:14} {space.shown_name[:24] or '-':24} {format_size(space.block_bytes):>10} "
                f"{space.num_blocks:>10} {space.num_disk_blocks:>10} {disk_bytes:>12}"
            )


@cache.command("ls", short_help="The blocks of a namespace, and where each is.")
@click.argument("namespace")
@_where
def list_blocks(namespace: str, folder: Path | None, reach: ConnectionOptions) -> None:
    """The blocks of NAMESPACE (a name, or the beginning of its digest) and where each is."""
    with _opened(folder, reach) as cached:
        for block_hash, flags in _chosen(cached, namespace).blocks():
            places = [
                word
                for word, flag in (("memory", LISTED_MEMORY), ("disk", LISTED_DISK), ("pinned", LISTED_PINNED))
                if flags & flag
            ]
            click.echo(f"{block_hash.hex()}  {' '.join(places)}")


@cache.command(short_help="Compare every block on disk with its checksum.")
@_where
def verify(folder: Path | None, reach: ConnectionOptions) -> None:
    """Read every block on disk and compare its checksum. Corrupt ones are named and removed; exit status 1 then."""
    num_corrupt = num_read = 0
    with _opened(folder, reach) as cached:
        for space in cached:
            hashes = [block_hash for block_hash, flags in space.blocks() if flags & LISTED_DISK]
            label = f"{space.shown_name or space.namespace[:12]}: {len(hashes)} blocks"
            corrupt = []
            with click.progressbar(length=len(hashes), label=label) as bar:
                for first in range(0, len(hashes), _VERIFY_BLOCKS):
                    part = hashes[first : first + _VERIFY_BLOCKS]
                    flags = space.verify(part)
                    corrupt += [block_hash for block_hash, is_whole in zip(part, flags, strict=True) if not is_whole]
                    bar.update(len(part))
            for block_hash in corrupt:
                click.echo(f"corrupt: {block_hash.hex()}")
            num_corrupt += len(corrupt)
            num_read += len(hashes)
    click.echo(f"{num_read} blocks read, {num_corrupt} corrupt")
    if num_corrupt:
        raise click.exceptions.Exit(1)


@cache.command()
@click.argument("namespace")
@_where
def drop(namespace: str, folder: Path | None, reach: ConnectionOptions) -> None:
    """Drop all blocks of NAMESPACE."""
    with _opened(folder, reach) as cached:
        click.echo(f"{_chosen(cached, namespace).drop()} blocks dropped")


@cache.command(short_help="Keep blocks of a namespace from eviction.")
@click.argument("namespace")
@click.argument("block", default="")
@click.option("--remove", is_flag=True, help="Stop keeping them.")
@_where
def pin(
    namespace: str,
    block: str,
    remove: bool,
    folder: Path | None,
    reach: ConnectionOptions,
) -> None:
    """Keep the blocks of NAMESPACE from eviction: all, or those whose hash begins with BLOCK."""
    with _opened(folder, reach) as cached:
        space = _chosen(cached, namespace)
        count = space.pin(_hashes(space, block), keep=not remove)
        click.echo(f"{count} blocks {'no longer pinned' if remove else 'pinned'}")
