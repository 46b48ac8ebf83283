"""The README's program runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.testing.servers import cache_server

README = Path(__file__).parents[2] / "README.md"


def test_the_program_of_the_readme_finds_what_it_stored(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with cache_server(memory="1GiB") as server:
        exec(compile(program.replace("unix:/tmp/kvtier.sock", server.unix), "README.md", "exec"), {})

    assert capsys.readouterr().out == "512 blocks; all\n"
