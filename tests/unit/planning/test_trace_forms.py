from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.planning.trace_forms import coarsened, form_of, read_form
from kvtier.simulate.trace import TracedRequest

MOONCAKE = {"timestamp": 2500, "input_length": 700, "output_length": 5, "hash_ids": [4, 5]}
BAILIAN = {
    **{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 7},
    **{"type": "text", "turn": 1, "hash_ids": [1, 2, 2**64 - 1]},
}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncakes_form_is_read_with_and_without_sessions(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", MOONCAKE, {**MOONCAKE, "session_id": "a"}, {**MOONCAKE, "session": 7})

    assert form_of(path) == "mooncake"
    plain, *others = read_form(path, "mooncake")
    assert plain == TracedRequest(2.5, 700, 5, (4, 5))
    assert [request.session for request in others] == ["a", "7"]


def test_bailians_form_has_seconds_and_sessions_by_their_first_chat(tmp_path: Path) -> None:
    later = {**BAILIAN, "chat_id": 160, "parent_chat_id": 159}
    last = {**BAILIAN, "chat_id": 170, "parent_chat_id": 160}
    path = written(tmp_path / "trace", BAILIAN, later, last, {**BAILIAN, "chat_id": 171})

    assert form_of(path) == "bailian"
    requests = list(read_form(path, "bailian"))
    assert requests[0] == TracedRequest(61.5, 40, 7, (1, 2, 2**63 - 1), "159")
    assert [request.session for request in requests] == ["159", "159", "159", "171"]


def test_a_compressed_trace_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode()))

    assert [request.hashes for request in read_form(path, form_of(path))] == [(4, 5)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "is not a file of JSON lines"),
        ("[1, 2]\n", "is not a file of JSON lines"),
        ('{"timestamp": 1, "input_length": 4}\n', "has no hash_ids"),
        ("[" * 100_000, "is not a file of JSON lines"),
    ],
)
def test_a_file_of_no_known_form_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)

    with pytest.raises(ConfigError, match=sentence):
        form_of(path)


@pytest.mark.parametrize(
    "line",
    [
        {**MOONCAKE, "timestamp": -1},
        {**MOONCAKE, "input_length": 1e99},
        {**MOONCAKE, "hash_ids": [-4]},
        {**MOONCAKE, "hash_ids": "4"},
        {"hash_ids": []},
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: object) -> None:
    path = written(tmp_path / "trace", MOONCAKE, line)

    with pytest.raises(ConfigError, match="line 2 of the trace"):
        list(read_form(path, "mooncake"))


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode() * 50)[:-12])

    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_form(path, "mooncake"))


def test_larger_blocks_are_equal_where_all_before_them_is() -> None:
    first = coarsened(TracedRequest(0, 80, 0, (1, 2, 3, 4, 5)), 2)
    second = coarsened(TracedRequest(0, 80, 0, (1, 2, 3, 9, 5)), 2)

    assert len(first.hashes) == 3
    assert first.hashes[0] == second.hashes[0]
    assert not {*first.hashes[1:]} & {*second.hashes[1:]}
