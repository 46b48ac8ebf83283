"""A benchmark's rows as cells of the documents' tables: `(row, column)`, both as the document writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Cells = dict[tuple[str, str], float | str]

_MODELS = {
    "Qwen2.5-32B": "Qwen2.5-32B-Instruct",
    "Qwen2.5-7B": "Qwen2.5-7B-Instruct",
    "Qwen2.5-3B": "Qwen2.5-3B-Instruct",
    "glm-4-9b-chat-1m": "glm-4-9b-chat-1m",
    "Llama-3.1-8B": "Llama-3.1-8B",
}
SCHEDULES = ("sync", "async-2")


def _model(shape: str) -> str:
    return _MODELS.get(shape, shape)


def memory_io(rows: Sequence[Row]) -> Cells:
    columns = {
        "l2l naive (s)": "l2l naive",
        "b2b naive (s)": "b2b naive",
        "b2b fancy index (s)": "b2b fancy index",
        "b2b index_copy_ (s)": "b2b index_copy_",
        "b2b cython memcpy (s)": "memcpy, by block",
        "swap in (s)": "swap in",
        "swap out (s)": "swap out",
    }
    return {
        (_model(row["shape"]), column): row.get(name, "needs a GPU") for row in rows for column, name in columns.items()
    }


def zmq(rows: Sequence[Row]) -> Cells:
    """The faster of pyzmq's two ways to copy."""
    cells: Cells = {}
    for row in rows:
        model, transport = _model(row["shape"]), row["what"].split()[1]
        seconds = float(row["get s"])
        if seconds < float(cells.get((model, transport), float("inf"))):
            cells[model, transport] = seconds
            cells[model, f"delta-{transport}"] = seconds / row["memcpy s"]
        cells[model, "b2b naive (s)"] = row["memcpy s"]
    return cells


def server(rows: Sequence[Row], transport: str) -> Cells:
    """`transport` is tcp or shm."""
    names = {
        "set deferred=False": "set",
        "set deferred=True": "set, deferred",
        "get": "get",
        "stream_get": "stream_get",
    }
    cells: Cells = {}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        seconds = {row["what"]: float(row["ms"]) / 1000 for row in rows if row["shape"] == shape}
        model, copy = _model(shape), seconds["memcpy, by block"]
        cells[model, "b2b naive (s)"] = copy
        for column, name in names.items():
            cells[model, column] = seconds[f"{transport} {name}"]
            cells[model, f"delta-{column}"] = seconds[f"{transport} {name}"] / copy
    return cells


def store_cost(rows: Sequence[Row], state: str, without: str, having: str) -> Cells:
    """`state` of the device's cache; `without` and `having` are what the columns of the two sides begin with."""
    cells: Cells = {}
    for row in rows:
        if row["device cache"] == state:
            tokens, schedule = str(row["tokens a step"]), row["schedule"]
            cells[tokens, f"{without}{schedule}"] = row["QPS without"]
            cells[tokens, f"{having}{schedule}"] = row["QPS with"]
            cells[tokens, f"Delta-{schedule}"] = row["median"]
    return cells


def remote_long_prefill(rows: Sequence[Row]) -> Cells:
    cells: Cells = {}
    for row in rows:
        number = int(str(row["round"]).partition(",")[0])
        is_on = row["device cache"] == "on"
        label = f"{number if is_on else number + 6}. remote+{'' if is_on else 'no_'}prefix_caching-{number}"
        cells |= {(label, name.removeprefix("N=")): value for name, value in row.items() if name.startswith("N=")}
    return cells


def offloading_long_prefill(rows: Sequence[Row]) -> Cells:
    labels = {
        "no cache": ("1. naive",),
        "device cache": tuple(f"{number + 1}. prefix_caching-{number}" for number in (1, 2, 3)),
        "host, device cache on": tuple(f"{number + 4}. offloading+prefix_caching-{number}" for number in (1, 2, 3)),
        "host, device cache off": tuple(f"{number + 7}. offloading+no_gpu_caching-{number}" for number in (1, 2, 3)),
    }
    return {
        (label, str(row["N"])): qps
        for row in rows
        if "N" in row
        for label, qps in zip(labels[row["what"]], row["rounds"], strict=False)
    }


def prefix_long_prefill(rows: Sequence[Row]) -> Cells:
    cells: Cells = {}
    for row in rows:
        if row.get("part") == "long prompts":
            reuses = row["manager"] in ("prefix_caching", "yoco")
            for number, qps in enumerate(row["rounds"], 1):
                cells[f"test_{row['manager']}{f'-{number}' if reuses else ''}", str(row["N"])] = qps
    return cells


def prefills(rows: Sequence[Row]) -> Cells:
    cells: Cells = {}
    for row in rows:
        shape, _, weights = row["shape"].partition(", ")
        model = f"{_model(shape)}-{weights or 'bf16'}"
        cells |= {
            (model, "num_attention_layers"): str(row["layers"]),
            (model, "num_kv_heads"): str(row["KV heads"]),
            (model, "head_size"): str(row["head"]),
            (model, "kv_cache_dtype"): str(row["KV dtype"]),
            (model, "prefill (s)"): row["prefill ms"] / 1000,
            (model, "swap in (s)"): row["copy in ms"] / 1000,
            (model, "swap out (s)"): row["copy out ms"] / 1000,
        }
    return cells


def baseline(rows: Sequence[Row]) -> Cells:
    return {
        (str(row["hit %"]), name.replace("naive", "naïve")): value
        for row in rows
        if row.get("part") == "table"
        for name, value in row.items()
        if name.endswith(SCHEDULES)
    }


def triangle(rows: Sequence[Row]) -> Cells:
    return {(str(row["round"]), str(row["document"])): row["ttft_s"] for row in rows}


def processes(rows: Sequence[Row]) -> Cells:
    cells: Cells = {}
    for row in rows:
        count = str(row["processes"])
        cells[count, "write (MiB/s)"] = row["cache write MiB/s"]
        cells[count, "read (MiB/s)"] = row["cache read MiB/s"]
        together = f"{row['cache write all MiB/s']} / {row['cache read all MiB/s']}"
        cells[count, "CPFS aggregate bandwidth (write/read)"] = together
    return cells
