"""A working folder with modules of the names that kvtier imports: none of them is run."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.deploy.run.child import PART_COMMAND
from kvtier.plugins.embedded_server import EmbeddedServer
from kvtier.testing.servers import cache_server
from tests.support.waiting import LIMIT_S

_NAMES = ("msgspec.py", "json.py", "logging.py", "kvtier/__init__.py", "xxhash/__init__.py", "sitecustomize.py")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once a module of the working folder has run."""
    marker = tmp_path / "ran"
    folder = tmp_path / "hostile"
    for name in _NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(3)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(kvtier.__file__).parents[1]))
    return marker


def test_the_modules_would_run_without_care(ran: Path) -> None:
    subprocess.run([sys.executable, "-m", "kvtier", "--help"], capture_output=True, timeout=LIMIT_S, check=False)
    assert ran.exists()


def test_a_part_of_a_deployment_runs_none_of_them(ran: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*PART_COMMAND, "cache", "cache", str(tmp_path), "1"],
        input=b"no settings\n",
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not ran.exists()
    assert b"kvtier" in done.stdout + done.stderr, "kvtier itself was run"


def test_a_server_of_a_plug_in_runs_none_of_them(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="kvtier-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        server = EmbeddedServer(8 << 20, unused_s=0.5)
        try:
            server.ensure()
        finally:
            server.close()
    assert not ran.exists()


def test_a_cache_server_runs_none_of_them(ran: Path) -> None:
    with cache_server():
        pass
    assert not ran.exists()


def _python_commands(tree: ast.AST) -> Iterator[list[ast.expr]]:
    """Lists and tuples that begin with `sys.executable`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            yield node.elts


def test_whoever_starts_python_says_that_the_working_folder_is_no_place_for_modules() -> None:
    found = 0
    for path in Path(kvtier.__file__).parent.rglob("*.py"):
        for words in _python_commands(ast.parse(path.read_text())):
            assert ast.unparse(words[1]) == "'-P'", f"{path} starts Python without -P"
            found += 1
    assert found >= 4
