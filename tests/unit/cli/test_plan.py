from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.cli.main import main
from tests.support.prompt_traffic import sessions


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["plan", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [
        {"timestamp": 1000 * number, "input_length": 512 * len(prompt), "output_length": 1, "hash_ids": prompt}
        for number, prompt in enumerate(sessions(5, 8))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_trace_is_planned_and_drawn(tmp_path: Path, trace: str) -> None:
    page = tmp_path / "plan.html"
    status, output = run(trace, "--model", "qwen2.5-7b", "--gpu", "h200", "--html", str(page))

    assert status == 0, output
    assert "H200 hours a day" in output
    assert "simulated on the same trace" in output
    assert page.read_text().startswith("<!doctype html>")


def test_without_a_simulation_the_plan_says_so(trace: str) -> None:
    status, output = run(trace, "--model", "qwen2.5-7b", "--no-simulate")

    assert status == 0
    assert "was not simulated" in output


def test_the_advice_is_for_the_policy_that_is_given(trace: str) -> None:
    for eviction, sentence in (("lru", "the advice is for LRU"), ("adaptive", "the advice is for the adaptive policy")):
        status, output = run(trace, "--model", "qwen2.5-7b", "--eviction", eviction)

        assert status == 0, output
        assert sentence in " ".join(output.split())


@pytest.mark.slow
def test_a_plan_is_drawn_as_a_picture(tmp_path: Path, trace: str) -> None:
    """In a process of its own: matplotlib keeps files of fonts open."""
    picture = tmp_path / "plan.png"
    command = [sys.executable, "-P", "-m", "kvtier", "plan", trace, "--model", "qwen2.5-7b", "--png", str(picture)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_one_sentence(
    tmp_path: Path, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    status, output = run(trace, "--model", "qwen2.5-7b", "--png", str(tmp_path / "plan.png"))

    assert status == 1
    assert output.splitlines()[-1].startswith("Error: a PNG needs matplotlib")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{trace}", "--model", "gpt-17"], "neither a known shape"),
        (["{trace}", "--model", "qwen2.5-7b", "--server", "unix:/x"], "not both"),
        (["{trace}", "--model", "qwen2.5-7b", "--html", "/nowhere/plan.html"], "/nowhere"),
        (["{trace}", "--model", "qwen2.5-7b", "--kv-dtype", "int3"], "KV dtype"),
        (["--model", "qwen2.5-7b", "--memory", "1GiB", "--server", "unix:/x"], "for a trace"),
        (["--model", "qwen2.5-7b", "--eviction", "lru", "--server", "unix:/x"], "for a trace"),
        (["--model", "qwen2.5-7b", "--server", "unix:/nowhere/none.sock"], "none.sock"),
    ],
)
def test_a_mistake_is_one_sentence(trace: str, arguments: list[str], sentence: str) -> None:
    status, output = run(*[argument.format(trace=trace) for argument in arguments])

    assert status == 1
    assert sentence in output.splitlines()[-1]
    assert "Traceback" not in output


def test_a_bad_trace_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("{}")

    status, output = run(str(tmp_path / "bad"), "--model", "qwen2.5-7b")

    assert status == 1
    assert output.startswith("Error: line 1 of the trace")
