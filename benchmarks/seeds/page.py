"""Makes docs/seeds.md from the results: the documents' tables with our values, and the document's in brackets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.seeds import readings
from benchmarks.seeds.readings import Cells, Row
from benchmarks.seeds.registry import CPU, GPU, RESULTS, ROOT, TABLES, Table
from benchmarks.seeds.seed_tables import SeedTable, seed_tables

PAGE = ROOT / "docs" / "seeds.md"
NOT_RUN = "not run yet"
Document = Mapping[str, Any]
Show = Callable[[Sequence[Row], Document], list[str]]

_HEAD = """# The tables of the documents the project comes from, measured again

`python -m benchmarks.seeds page` writes this page from `benchmarks/results/seeds/`; `python -m benchmarks.seeds --list`
names the file and the commit of each, `python -m benchmarks.seeds run NAME` measures one. Parameters are the
documents'. A cell is ours, and in brackets what the document has. S0 to S3 were measured on an RTX 4090 (24 GB, PCIe
4), with real weights; ours have random weights of the same shapes. S4 was measured on a host with an SSD (3 GiB/s read,
1.5 GiB/s write) and on Aliyun's CPFS. Machines differ: compare ratios within a column's own machine.
"""


@dataclass(frozen=True)
class Section:
    """A table of the page: `show` makes its lines from rows, possibly none."""

    name: str
    show: Show
    words: str


def make_page(folder: Path = RESULTS) -> str:
    lines = [_HEAD]
    by_name = {table.name: table for table in TABLES}
    for section in SECTIONS:
        table = by_name[section.name]
        lines += [f"## {table.title}", "", section.words, ""]
        for machine in table.needs + tuple(m for m in (GPU, CPU) if m not in table.needs and _found(table, m, folder)):
            lines += _of_machine(section, table, machine, folder)
        for picture in table.pictures:
            file = table.picture(picture, folder)
            if file.exists():
                lines += [f"![{table.title}](../benchmarks/results/seeds/{file.name})", ""]
            else:
                lines += [f"Picture `{picture}`: {NOT_RUN}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _found(table: Table, machine: str, folder: Path) -> list[Document]:
    return [json.loads(file.read_text()) for file in table.results(machine, folder) if file.exists()]


def _of_machine(section: Section, table: Table, machine: str, folder: Path) -> list[str]:
    documents = _found(table, machine, folder)
    rows = [row for document in documents for row in document["rows"]]
    lines = [_origin(documents, machine), "", *section.show(rows, documents[0] if documents else {}), ""]
    absent = [file.name for file in table.results(machine, folder) if not file.exists()]
    if documents and absent:
        lines += [f"{NOT_RUN.capitalize()}: {', '.join(f'`{name}`' for name in absent)}.", ""]
    return lines


def _origin(documents: Sequence[Document], machine: str) -> str:
    if not documents:
        return f"{'An H200' if machine == GPU else 'A CPU'}: {NOT_RUN}."
    said = []
    for document in documents:
        of, settings = document["machine"], document["settings"]
        device = settings.get("device", "")
        where = f"{device}, " if device and device not in ("cpu", "host memory") else ""
        cores = f"{of['cores']} cores of {of['cpu']} ({of['arch']})"
        said.append(f"{where}{cores}, commit {document['commit']}, {document['at'][:10]}")
    return f"Measured on: {'; '.join(dict.fromkeys(said))}."


# --- tables -----------------------------------------------------------------------------------------------------------


def beside(name: str, cells: Cells) -> list[str]:
    """The document's table with our cells; a cell that the document leaves empty stays empty."""
    table = seed_tables()[name]
    lines = _head(table.corner, table.columns)
    for row in table.rows:
        lines.append("| " + " | ".join((row, *(_cell(table, row, column, cells) for column in table.columns))) + " |")
    return lines


def _cell(table: SeedTable, row: str, column: str, cells: Cells) -> str:
    seed, own = table.cell(row, column), cells.get((row, column))
    if not seed and own is None:
        return ""
    shown = NOT_RUN if own is None else _shown(own)
    return shown if shown == seed else f"{shown} ({seed})"


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _head(*columns: str | Sequence[str]) -> list[str]:
    names = [name for one in columns for name in ([one] if isinstance(one, str) else one)]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _plain(columns: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    """Our own rows. `columns` maps names of the rows' fields to headings."""
    lines = _head(tuple(columns.values()))
    for row in rows or [{}]:
        cells = [_shown(row[name]) if name in row else NOT_RUN for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _beside(name: str, read: Callable[[Sequence[Row]], Cells]) -> Show:
    return lambda rows, document: beside(name, read(rows))


def _server(rows: Sequence[Row], document: Document) -> list[str]:
    return [
        "Over TCP:",
        "",
        *beside("s0-server", readings.server(rows, "tcp")),
        "",
        "Over shared memory:",
        "",
        *beside("s0-server", readings.server(rows, "shm")),
    ]


def _store(name: str, without: Mapping[str, str], having: str) -> Show:
    def show(rows: Sequence[Row], document: Document) -> list[str]:
        lines: list[str] = []
        for state in ("on", "off"):
            cells = readings.store_cost(rows, state, without[state], having)
            lines += [f"GPU cache {state}:", "", *beside(f"{name}-{state}", cells), ""]
        return lines[:-1]

    return show


def _swap(rows: Sequence[Row], document: Document) -> list[str]:
    ways = ("one large copy, pinned", "torch, a copy per block", "copier, own memory", "copier, server's arena")
    lines = _head("model", [f"swap {way}: {what} (s)" for way in ("in", "out") for what in ways])
    seed = seed_tables()["s0-memory-io"]
    for model in seed.rows:
        cells = []
        for way in ("in", "out"):
            for what in ways:
                own = next((row for row in rows if _is_swap(row, model, way, what)), None)
                shown = NOT_RUN if own is None else _shown(float(own["ms"]) / 1000)
                is_theirs = what == "copier, own memory"
                cells.append(f"{shown} ({seed.cell(model, f'swap {way} (s)')})" if is_theirs else shown)
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return lines


def _is_swap(row: Row, model: str, way: str, what: str) -> bool:
    name = str(row["what"]).removesuffix(", 1 group")
    return model.startswith(str(row["shape"])) and (row["swap"], name) == (way, what)


def _profile(rows: Sequence[Row], document: Document) -> list[str]:
    names = ("copies", "threads or streams", "copying ms", "computing ms", "of ms", "copies beside compute")
    return _plain({name: name for name in names}, [row for row in rows if "copying ms" in row])


def _hits(rows: Sequence[Row], document: Document) -> list[str]:
    names = ("no cache", "device hit", "host hit, device cache on", "host hit, device cache off")
    columns = {"hit %": "hit %", **{name: name for name in names}, "host, cache off / device": "host off / device"}
    return _plain(columns, sorted(rows, key=lambda row: int(row["hit %"])))


def _transfer_in(rows: Sequence[Row], document: Document) -> list[str]:
    names = ("hit %", "first QPS", "second QPS", "second / first", "second from")
    return _plain({name: name for name in names}, sorted(rows, key=lambda row: int(row["hit %"])))


_SPEED_SEED = {
    "cold": ("34.79", "1"),
    "asked again": ("0.370", "94"),
    "engine restarted": ("not measured", "not measured"),
    "all restarted": ("6.43", "5.4"),
}


def _speed(rows: Sequence[Row], document: Document) -> list[str]:
    lines = _head("", "seconds to the first token", "times faster", "from")
    for what, (seconds, times) in _SPEED_SEED.items():
        own = next((row for row in rows if row["what"] == what), None)
        if own is None:
            lines.append(f"| {what} | {NOT_RUN} ({seconds}) | {NOT_RUN} ({times}) | {NOT_RUN} |")
        else:
            source = ", ".join(f"{tier} {count}" for tier, count in own["cached"].items() if count) or "computed"
            ttft, faster = _shown(own["ttft_s"]), _shown(own["times faster"])
            lines.append(f"| {what} | {ttft} ({seconds}) | {faster} ({times}) | {source} |")
    return [*lines, "", f"On disk: {_disk(document)} (7.95 GB)."]


def _disk(document: Document) -> str:
    nbytes = document.get("settings", {}).get("disk_bytes")
    return NOT_RUN if nbytes is None else f"{nbytes / 1e9:.2f} GB"


def _stress(rows: Sequence[Row], document: Document) -> list[str]:
    return [*beside("s2-stress", readings.triangle(rows)), "", f"On disk at the end: {_disk(document)} (47.6 GB)."]


def _file_store(rows: Sequence[Row], document: Document) -> list[str]:
    names = (
        *("workers", "query token/s", "update token/s", "query MiB/s", "update MiB/s", "raw read MiB/s"),
        *("raw write MiB/s", "query of raw", "update of raw"),
    )
    of_workers = [row for row in rows if "workers" in row]
    tokens, rate = seed_tables()["s4-ssd-tokens"].rows[""], seed_tables()["s4-ssd-rate"].rows[""]
    seed = f"The document, on its SSD: {tokens[0]} and {tokens[1]} token/s, {rate[0]} and {rate[1]} MiB/s."
    return [*_plain({name: name for name in names}, of_workers), "", seed]


def _processes(rows: Sequence[Row], document: Document) -> list[str]:
    names = ("processes", "query token/s", "update token/s", "query of raw", "update of raw")
    tokens = seed_tables()["s4-dfs-tokens"].rows[""]
    return [
        *beside("s4-dfs", readings.processes(rows)),
        "",
        *_plain({name: name for name in names}, rows),
        "",
        f"The document, 32 workers on CPFS: {tokens[0]} token/s queried and {tokens[1]} updated by each.",
    ]


SECTIONS: tuple[Section, ...] = (
    Section(
        "s0-memory-io",
        _beside("s0-memory-io", readings.memory_io),
        "Seconds for 512 blocks. `b2b cython memcpy` is ours from ctypes, one call per block.",
    ),
    Section(
        "s0-zmq",
        _beside("s0-zmq", readings.zmq),
        "Seconds to get 512 blocks, and over one memcpy of them; ours is the faster of copying and not copying.",
    ),
    Section(
        "s0-server",
        _server,
        "Seconds for 512 blocks through the server, and over a memcpy of each. The document's server speaks ZeroMQ "
        "over TCP; its column `delta-get` repeats another one, and stands here as it must be.",
    ),
    Section(
        "s0-transfer-out",
        _store("s0-transfer-out", {"on": "swap_out-", "off": "swap out-"}, "transfer_out-"),
        "Requests per second, Qwen2.5-3B. The document compares with host memory below the GPU; ours compares with no "
        "tier at all. `Delta` is the median of pairs.",
    ),
    Section(
        "s0-transfer-in-off",
        _transfer_in,
        "Requests per second, Qwen2.5-3B. The document has a picture and this: at 0% the second run has 50 to 60 "
        "requests per second after 20.",
    ),
    Section("s0-transfer-in-on", _transfer_in, "As above. In the document the GPU's cache raises it further."),
    Section(
        "s0-long-prefill",
        _beside("s0-long-prefill", readings.remote_long_prefill),
        "Requests per second by tokens out, Qwen2.5-7B. Rounds 1 and 7 compute, 4 and 10 load from the cache server.",
    ),
    Section(
        "s1-prefills",
        _beside("s1-prefills", readings.prefills),
        "One prompt of 8,192 tokens, 1,024 a step.",
    ),
    Section(
        "s1-swap",
        _swap,
        "Seconds for 512 scattered blocks; in brackets the document's swap in and swap out.",
    ),
    Section(
        "s1-profiler-swap-out",
        _profile,
        "Qwen2.5-3B, 4 prompts of 2,048 tokens, 1,024 a step, 16 out. In the document 1,024 tokens take 16 ms to swap "
        "out, a copy for each layer of each block.",
    ),
    Section(
        "s1-profiler-swap-in",
        _profile,
        "The same with three of four prompts in host memory and the GPU's cache off.",
    ),
    Section(
        "s1-swap-out",
        _store("s1-swap-out", {"on": "", "off": ""}, "offloading-"),
        "Requests per second, Qwen2.5-3B. `Delta` is the median of pairs.",
    ),
    Section(
        "s1-swap-in",
        _hits,
        "Requests per second, Qwen2.5-3B, 40 GiB of host memory. The document has a picture and this: host memory is "
        "as fast as the GPU's cache below 80%.",
    ),
    Section(
        "s1-long-prefill",
        _beside("s1-long-prefill", readings.offloading_long_prefill),
        "Requests per second by tokens out, Qwen2.5-7B.",
    ),
    Section(
        "s2-speed",
        _speed,
        "glm-4-9b in fp8, 10.5 GiB of KV on the GPU. Seconds to the first token through the OpenAI API.",
    ),
    Section(
        "s2-stress",
        _stress,
        "Seconds to the first token: round n asks about documents 1 to n, the last of them new.",
    ),
    Section(
        "s3-baseline",
        _beside("s3-baseline", readings.baseline),
        "Requests per second, Qwen2.5-3B, 1,024 tokens a step.",
    ),
    Section(
        "s3-long-prefill",
        _beside("s3-long-prefill", readings.prefix_long_prefill),
        "Requests per second by tokens out, Qwen2.5-7B.",
    ),
    Section("s4-file-store", _file_store, "80 layers of 32 KiB tensors a token, 16 tokens a chunk, direct I/O."),
    Section(
        "s4-processes",
        _processes,
        "MiB/s of one process and of all together. The document's are fio's on CPFS; ours are of the file store, on "
        "the local disk of one machine, which all processes share.",
    ),
)
