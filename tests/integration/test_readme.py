"""The programs of docs/engine.md run unchanged; README.md is short; documents are linked to each other."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvtier.testing.servers import cache_server
from tests.support.document_code import DOCUMENTS, ROOT, code_about

MODEL = str(ROOT / "examples/model")
PROGRAM = code_about("docs/engine.md", "block_manager")
TIERS = code_about("docs/engine.md", "swap_space")


def _run(program: str) -> None:
    exec(compile(program, "document", "exec"), {})


def test_the_program_for_the_engine_answers(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    _run(PROGRAM.text.replace("examples/model", MODEL))

    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "{'device': 0}" in first
    assert "{'device': 4}" in second, "yoco reuses the four tokens that both prompts begin with"


def test_the_engine_takes_the_tiers_that_the_document_names() -> None:
    """Engines are closed here; a server over TCP need not be there."""
    lines = TIERS.text.splitlines()
    calls = [line.partition("  #")[0] for line in lines if line.startswith("LLM(")]
    assert len(calls) == 3
    with cache_server(memory="64MiB") as server:
        for call in calls:
            here = call.replace("examples/model", MODEL).replace("unix:/tmp/kvtier.sock", server.unix)
            here = here.replace("tcp://host:7700", "tcp://127.0.0.1:1").replace("1 << 30", "1 << 24")
            _run(f"from kvtier import LLM\n{here}.close()\n")


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert len(text.split()) <= 900
    assert sum(line.startswith("|") for line in text.splitlines()) <= 15


def test_the_index_links_every_document() -> None:
    index = ROOT / "docs/index.md"
    targets = re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
    linked = {(index.parent / target).resolve() for target in targets}

    missing = {path for path in index.parent.rglob("*.md")} - linked - {index}

    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            path = Path(os.path.normpath(document.parent / target.partition("#")[0]))
            assert path.exists(), f"{document.relative_to(ROOT)} links to {target}"
