"""Budgets instead of an address: the cache server is started with the engine and goes after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.vllm.engines import ask_one, engine, forget_prefixes, model_folder, tokens_of, wait_until_stored

_PROMPT = tokens_of(300)


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of these tests only."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def test_without_an_address_the_engine_starts_its_own_server_and_hits(tmp_path: Path) -> None:
    settings: dict[str, object] = {"memory": "64MiB"}
    with engine(model_folder(), settings=settings) as llm:
        cold = ask_one(llm, _PROMPT)
        (socket,) = tmp_path.glob("run/**/*.sock")
        wait_until_stored(f"unix:{socket}", _PROMPT)
        forget_prefixes(llm)
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert (cold.num_cached, warm.num_cached) == (0, 288)


def test_with_a_folder_the_next_engine_hits(tmp_path: Path) -> None:
    settings: dict[str, object] = {"memory": "64MiB", "folder": str(tmp_path / "cache"), "disk": "64MiB"}
    with engine(model_folder(), settings=settings) as llm:
        cold = ask_one(llm, _PROMPT)
        (socket,) = tmp_path.glob("run/**/*.sock")
        wait_until_stored(f"unix:{socket}", _PROMPT)

    with engine(model_folder(), settings=settings) as llm:
        warm = ask_one(llm, _PROMPT)

    assert warm.tokens == cold.tokens
    assert (cold.num_cached, warm.num_cached) == (0, 288)
