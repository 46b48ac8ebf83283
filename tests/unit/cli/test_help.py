"""Help of every command: whole sentences, none of which is cut."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from kvtier.cli.main import main

_WIDTH = 80


def _commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, (*path, name))


_ALL = list(_commands(main))


def test_there_are_groups_and_commands_to_look_at() -> None:
    assert {(), ("cache",), ("cache", "pin"), ("cluster", "create"), ("serve",)} <= set(_ALL)


@pytest.mark.parametrize("path", _ALL, ids=lambda path: " ".join(path) or "kvtier")
def test_no_sentence_of_the_help_is_cut(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"], terminal_width=_WIDTH)

    assert result.exit_code == 0
    usage, *lines = result.output.splitlines()
    assert usage.startswith("Usage: ")
    assert [line for line in lines if line.rstrip().endswith(("...", "\N{HORIZONTAL ELLIPSIS}"))] == []
