"""Budgets instead of an address: the cache server is started with the engine and goes after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.vllm.engines import ask_one, engine, forget_prefixes, model_folder, tokens_of, wait_until_stored

_PROMPT = tokens_of(300)


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Servers of these tests only. The path of a socket must be short, and `tmp_path` is not."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_without_an_address_the_engine_starts_its_own_server_and_hits(runtime_folder: Path) -> None:
    settings: dict[str, object] = {"memory": "64MiB"}
    with engine(model_folder(), settings=settings) as llm:
        cold = ask_one(llm, _PROMPT)
        (socket,) = runtime_folder.glob("**/*.sock")
        wait_until_stored(f"unix:{socket}", _PROMPT)
        forget_prefixes(llm)
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert (cold.num_cached, warm.num_cached) == (0, 288)


def test_with_a_folder_the_next_engine_hits(runtime_folder: Path, tmp_path: Path) -> None:
    settings: dict[str, object] = {"memory": "64MiB", "folder": str(tmp_path / "cache"), "disk": "64MiB"}
    with engine(model_folder(), settings=settings) as llm:
        cold = ask_one(llm, _PROMPT)
        (socket,) = runtime_folder.glob("**/*.sock")
        wait_until_stored(f"unix:{socket}", _PROMPT)

    with engine(model_folder(), settings=settings) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert (cold.num_cached, warm.num_cached) == (0, 288)
