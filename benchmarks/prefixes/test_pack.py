"""A pack of a 100,000-token document: written and read, against a plain copy of a file of the same size.

    python -m benchmarks.prefixes.test_pack [--quick] [--json FILE] [--model-shape SHAPE]

A cache server in a process of its own has the blocks in memory, 4 GiB of them at most, which 100,000 tokens of the
default shape take less than (`--quick`: 8,000 tokens). `export` and `import` move them
between it and a pack, as `kvtier pack` does; `signed` packs have a key. The copy reads and writes the same file in
pieces of 32 MiB. What is written is on disk at the end (`fsync`). Figures are the pack's seconds over the copy's.
"""

from __future__ import annotations

import os
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
_KEY = b"a key that both ends have"
_BARS = {"export_vs_copy": "<= 1.5", "import_vs_copy": "<= 1.5"}


def main() -> int:
    options, _ = read_options(make_parser(__doc__ or ""), ("Qwen2.5-3B",), ("Qwen2.5-3B",))
    result = Result("prefixes.test_pack", {"bars": _BARS})
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
        result.figures["export_vs_copy"] = seconds["export"] / seconds["copy"]
        result.figures["import_vs_copy"] = seconds["import"] / seconds["copy"]
        result.figures["signed_export_vs_copy"] = seconds["signed export"] / seconds["copy"]
    print_table("packs", result.rows)
    return finish(result, _BARS, options.json)


def _measure(folder: Path, layout: KvLayout, num_blocks: int, repeats: int) -> dict[str, float]:
    fields = NamespaceFields(layout=layout, weights="random")
    hashes = block_hashes(fields.digest(), range(num_blocks * layout.block_tokens), layout.block_tokens)
    data = BlockMemory(num_blocks, layout.block_bytes, seed=1)
    memory = str(num_blocks * layout.slot_bytes * 5 // 4 + _PIECE_BYTES)
    with cache_server(memory=memory) as server, connect(server.unix, layout=layout, namespace=fields) as client:
        for first in range(0, num_blocks, 64):
            client.set(hashes[first : first + 64], data.blocks[first : first + 64])
        plain, signed, copied = (folder / name for name in ("plain", "signed", "copied"))
        header = _header(client, layout, num_blocks)
        times = race(
            [
                Contender("copy", lambda: _copy(plain, copied), _exported(client, header, hashes, plain, None)),
                Contender("export", _exported(client, header, hashes, plain, None)),
                Contender("signed export", _exported(client, header, hashes, signed, _KEY)),
                Contender("import", lambda: _import(client, plain, None), lambda: client.drop(hashes)),
                Contender("signed import", lambda: _import(client, signed, _KEY), lambda: client.drop(hashes)),
            ],
            repeats,
        )
        found = BlockMemory(num_blocks, layout.block_bytes)
        for first in range(0, num_blocks, 64):
            client.get(hashes[first : first + 64], found.blocks[first : first + 64])
        found.expect(data)
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


def _copy(source: Path, target: Path) -> None:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as written:
        while count := read.readinto(buffer):
            written.write(buffer[:count])
        os.fsync(written.fileno())


if __name__ == "__main__":
    sys.exit(main())
