from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.simulate.trace import MAX_LINE_BYTES, TracedRequest, by_arrival, read_traces

MOONCAKE = b'{"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 14]}\n'
AGENTIC = b'{"timestamp":16062,"session":13,"input_length":1100,"output_length":4,"hash_ids":[8,9]}\n'


def test_a_line_of_mooncake_and_one_with_a_session_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(MOONCAKE + b"\n" + AGENTIC)

    assert list(read_traces(path)) == [
        TracedRequest(2.5, 600, 7, (0, 14), None),
        TracedRequest(16.062, 1100, 4, (8, 9), "13"),
    ]


def test_a_trace_may_be_compressed_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(MOONCAKE))

    assert [request.hashes for request in read_traces(path)] == [(0, 14)]


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"{",
        b"\xff",
        b'{"timestamp": 1, "input_length": 5}',
        b'{"timestamp": -1, "input_length": 5, "hash_ids": []}',
        b'{"timestamp": 1e300, "input_length": 5, "hash_ids": []}',
        b'{"timestamp": 1, "input_length": -5, "hash_ids": []}',
        b'{"timestamp": 1, "input_length": 99999999999, "hash_ids": []}',
        b'{"timestamp": 1, "input_length": 5, "hash_ids": [-1]}',
        b'{"timestamp": 1, "input_length": 5, "hash_ids": [99999999999999999999]}',
        b'{"timestamp": 1, "input_length": 5, "hash_ids": ["a"]}',
        b'{"timestamp": 1, "input_length": 5, "hash_ids": [], "session": []}',
        b'{"timestamp": 1, "input_length": 5, "hash_ids": [], "session": "' + b"s" * 300 + b'"}',
        b"[" * 100_000,
    ],
)
def test_a_bad_line_is_named_in_one_sentence(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(MOONCAKE + line + b"\n")

    with pytest.raises(ConfigError, match=r"^line 2 of the trace [^\n]* is not a request: [^\n]*$"):
        list(read_traces(path))


def test_a_line_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"[" * (MAX_LINE_BYTES + 2), 1))

    with pytest.raises(ConfigError, match=r"line 1 of the trace .* is longer than"):
        list(read_traces(path))


@pytest.mark.parametrize(
    "raw", [gzip.compress(MOONCAKE)[:-9], gzip.compress(MOONCAKE)[:12] + b"junk"], ids=["cut", "damaged"]
)
def test_a_damaged_archive_is_an_error_that_names_the_file(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(raw)

    with pytest.raises(ConfigError, match=r"the trace .* cannot be read"):
        list(read_traces(path))


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            list(read_traces(path))


def test_requests_are_sorted_by_arrival_and_keep_their_order_within_an_instant() -> None:
    first, second, third = TracedRequest(1, 1, 1, (1,)), TracedRequest(2, 1, 1, (2,)), TracedRequest(2, 1, 1, (3,))

    assert by_arrival([second, third, first]) == [first, second, third]
