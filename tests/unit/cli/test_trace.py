from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from kvtier.cli.main import main
from kvtier.simulate.trace import read_traces

LINE = {"chat_id": 1, "timestamp": 2.0, "input_length": 600, "output_length": 7, "hash_ids": list(range(38))}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["trace", *arguments])
    return result.exit_code, result.output


def test_a_trace_is_converted_with_larger_blocks(tmp_path: Path) -> None:
    (tmp_path / "bailian").write_text(json.dumps(LINE))

    status, output = run("convert", str(tmp_path / "bailian"), str(tmp_path / "ours.gz"), "--block-tokens", "512")

    assert (status, output.count("1 requests")) == (0, 1)
    (request,) = read_traces(tmp_path / "ours.gz")
    assert (request.arrived_s, request.input_length, len(request.hashes)) == (2.0, 600, 2)


def test_a_bad_line_is_one_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text(json.dumps(LINE) + "\n{}\n")

    status, output = run("convert", str(tmp_path / "bad"), str(tmp_path / "ours"))

    assert status == 1
    assert output.startswith("Error: line 2 of the trace")
    assert output.count("\n") == 1
    assert not (tmp_path / "ours").exists()


def test_blocks_cannot_become_smaller(tmp_path: Path) -> None:
    (tmp_path / "bailian").write_text(json.dumps(LINE))

    assert "multiple of 16" in run("convert", str(tmp_path / "bailian"), str(tmp_path / "o"), "--block-tokens", "8")[1]


def test_recording_without_a_server_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    status, output = run("record", str(tmp_path / "trace"), "--server", f"unix:{tmp_path}/none.sock")

    assert status == 1
    assert output.startswith("Error: ")
    assert not (tmp_path / "trace").exists()
