"""A pack of a 100,000-token document: written and read, against the disk's own speed.

    python -m benchmarks.prefixes.test_pack [--quick] [--json FILE] [--model-shape SHAPE] [--repeats N]

A cache server in a process of its own has the blocks in memory: 3.4 GiB for 100,000 tokens of the default shape, and at
most 4 GiB of any other (`--quick`: 8,000 tokens). `export` and `import` move them between it and a pack, as `kvtier
pack` does; `signed` packs have a key. `write` and `read` move as many bytes between the same disk and one piece of
memory, 32 MiB at a time. What is written is on disk at the end (`fsync`); what is read comes from the disk, not from
the system's page cache. Figures are the pack's seconds over the disk's. The files take three times the document's size,
in `KVTIER_BENCH_FOLDER` or the system's folder for temporary files.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import BlockMemory, Contender, Result, finish, make_parser, print_table, race, read_options
from benchmarks.shapes import SHAPES
from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.packs.form import PackHeader, PackReader, PackWriter, section_blocks_of
from kvtier.packs.moving import export_blocks, import_blocks
from kvtier.sizes import format_size
from kvtier.testing.servers import cache_server

_TOKENS, _QUICK_TOKENS = 100_000, 8_000
_MAX_BYTES = 4 << 30
_PIECE_BYTES = 32 << 20
_BATCH = 64
_KEY = b"a key that both ends have"
_BARS = {"export_vs_disk": "<= 1.5", "import_vs_disk": "<= 1.5"}


def main() -> int:
    options, _ = read_options(make_parser(__doc__ or ""), ("Qwen2.5-3B",), ("Qwen2.5-3B",))
    result = Result("prefixes.test_pack", {"repeats": options.repeats})
    for name in options.shapes:
        layout = SHAPES[name]
        most = _MAX_BYTES // layout.slot_bytes
        num_blocks = min(most, (_QUICK_TOKENS if options.quick else _TOKENS) // layout.block_tokens)
        with tempfile.TemporaryDirectory(prefix="kvtier-pack-", dir=os.environ.get("KVTIER_BENCH_FOLDER")) as scratch:
            seconds = _measure(Path(scratch), layout, num_blocks, options.repeats)
        nbytes = num_blocks * layout.block_bytes
        for what, each in seconds.items():
            row = {"shape": name, "what": what, "size": format_size(nbytes), "GiB/s": round(nbytes / each / 2**30, 2)}
            result.rows.append(row)
        for figure, what, disk in (
            ("export_vs_disk", "export", "write"),
            ("import_vs_disk", "import", "read"),
            ("signed_export_vs_disk", "signed export", "write"),
            ("signed_import_vs_disk", "signed import", "read"),
        ):
            result.figures[figure] = seconds[what] / seconds[disk]
    print_table("packs", result.rows)
    return finish(result, _BARS, options.json)


def _measure(folder: Path, layout: KvLayout, num_blocks: int, repeats: int) -> dict[str, float]:
    fields = NamespaceFields(layout=layout, weights="random")
    hashes = block_hashes(fields.digest(), range(num_blocks * layout.block_tokens), layout.block_tokens)
    memory = str(num_blocks * layout.slot_bytes * 5 // 4 + _PIECE_BYTES)
    with cache_server(memory=memory) as server, connect(server.unix, layout=layout, namespace=fields) as client:
        for first in range(0, num_blocks, _BATCH):
            part = hashes[first : first + _BATCH]
            client.set(part, BlockMemory(len(part), layout.block_bytes, seed=first).blocks)
        plain, signed, raw = (folder / name for name in ("plain", "signed", "raw"))
        header = _header(client, layout, num_blocks)
        nbytes = num_blocks * layout.block_bytes

        def absent(path: Path) -> Callable[[], None]:
            return lambda: path.unlink(missing_ok=True)

        def dropped(path: Path) -> Callable[[], None]:
            def drop() -> None:
                client.drop(hashes)
                _forget(path)

            return drop

        times = race(
            [
                Contender("write", lambda: _write(raw, nbytes), absent(raw)),
                Contender("export", _exported(client, header, hashes, plain, None), absent(plain)),
                Contender("signed export", _exported(client, header, hashes, signed, _KEY), absent(signed)),
                Contender("read", lambda: _read(raw), lambda: _forget(raw)),
                Contender("import", lambda: _import(client, plain, None), dropped(plain)),
                Contender("signed import", lambda: _import(client, signed, _KEY), dropped(signed)),
            ],
            repeats,
        )
        for first in range(0, num_blocks, _BATCH):
            part = hashes[first : first + _BATCH]
            found = BlockMemory(len(part), layout.block_bytes)
            client.get(part, found.blocks)
            found.expect(BlockMemory(len(part), layout.block_bytes, seed=first))
    return times


def _header(client: CacheClient, layout: KvLayout, num_blocks: int) -> PackHeader:
    [known] = client.namespaces()
    return PackHeader(
        name="document",
        model="random",
        namespace=known.digest,
        root=known.digest,
        fields=known.fields,
        block_bytes=layout.block_bytes,
        block_tokens=layout.block_tokens,
        num_blocks=num_blocks,
        section_blocks=section_blocks_of(layout.block_bytes),
        tokens=num_blocks * layout.block_tokens,
    )


def _exported(
    client: CacheClient, header: PackHeader, hashes: list[BlockHash], path: Path, key: bytes | None
) -> Callable[[], None]:
    values = {name: getattr(header, name) for name in header.__struct_fields__}
    whole = PackHeader(**{**values, "is_signed": key is not None})

    def export() -> None:
        with path.open("wb", buffering=0) as file:
            export_blocks(client, PackWriter(file, whole, hashes, b"", key), whole, hashes, lambda _: None)
            os.fsync(file.fileno())

    return export


def _import(client: CacheClient, path: Path, key: bytes | None) -> None:
    with path.open("rb", buffering=0) as file:
        import_blocks(client, PackReader(file, path.name, key), lambda _: None)


def _write(path: Path, nbytes: int) -> None:
    piece = memoryview(_RANDOM)
    with path.open("wb", buffering=0) as file:
        left = nbytes
        while left:
            left -= file.write(piece[: min(left, _PIECE_BYTES)])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget(path: Path) -> None:
    """The system's page cache no longer has the file, which is on disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


_RANDOM = random.Random(1).randbytes(_PIECE_BYTES)


if __name__ == "__main__":
    sys.exit(main())
