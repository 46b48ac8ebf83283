"""The README's programs run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model

README = Path(__file__).parents[2] / "README.md"


def _program(about: str) -> str:
    """The first one that has `about` in it."""
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return next(program for program in programs if about in program)


def test_the_program_for_the_server_finds_what_it_stored(capsys: pytest.CaptureFixture[str]) -> None:
    program = _program("kvtier.connect")
    with cache_server(memory="1GiB") as server:
        exec(compile(program.replace("unix:/tmp/kvtier.sock", server.unix), "README.md", "exec"), {})

    assert capsys.readouterr().out == "512 blocks; all\n"


def test_the_program_for_the_engine_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = _program("block_manager")
    save_tiny_model(tmp_path, "qwen2", with_tokenizer=True)
    capsys.readouterr()
    exec(compile(program.replace("path/to/model", str(tmp_path)), "README.md", "exec"), {})

    out = capsys.readouterr().out
    assert "{'device': 0}" in out
    assert "{'device': 4}" in out, "yoco reuses the four tokens that both prompts begin with"
