"""The cache servers of this user's deployments are found, and named when there are several."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.cli.main import main
from kvtier.deploy.run.served_caches import (
    NOTE_FILE,
    find_caches,
    find_engines,
    make_runtime_folder,
    note_caches,
    remove_runtime_folder,
)

Serve = Callable[..., list[str]]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of this user, with a short name."""
    with tempfile.TemporaryDirectory(prefix="kvt") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setattr("kvtier.cli.connection_options.default_socket", lambda: f"{name}/kvtier.sock")
        yield Path(name)


@pytest.fixture
def serve(runtime: Path) -> Iterator[Serve]:
    """Notes a deployment whose caches have these names, and listens for those; gives their addresses."""
    with ExitStack() as stack:

        def start(file: str, *names: str, dead: tuple[str, ...] = ()) -> list[str]:
            folder = make_runtime_folder()
            for name in names:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(str(folder / f"{name}.sock"))
                listener.listen()
            caches = {name: f"unix:{folder}/{name}.sock" for name in (*names, *dead)}
            note_caches(folder, Path(file), caches)
            return [caches[name] for name in names]

        yield start


def test_a_server_that_answers_is_found_and_one_that_is_gone_is_not(serve: Serve) -> None:
    (address,) = serve("/srv/deploy.yml", "cache", dead=("gone",))

    (found,) = find_caches()
    assert (found.address, found.whose) == (address, "cache of /srv/deploy.yml")


def test_a_note_that_is_none_is_passed_over(serve: Serve, runtime: Path) -> None:
    for number, text in enumerate(("", "{", "[]", '{"file": 1, "caches": {}}', '{"file": "x", "caches": {"a": "b"}}')):
        folder = runtime / f"kvtier-{number}"
        folder.mkdir()
        (folder / NOTE_FILE).write_text(text)
    (address,) = serve("/srv/deploy.yml", "cache")

    assert [one.address for one in find_caches()] == [address]


def test_of_several_servers_all_are_named(serve: Serve) -> None:
    addresses = serve("/srv/one.yml", "cache") + serve("/srv/two.yml", "a", "b")

    result = CliRunner().invoke(main, ["explain", "some-request"])

    assert result.exit_code == 1
    assert result.output.startswith("Error: 3 cache servers are running here: say which with --server, unix:")
    assert all(address in result.output for address in addresses)
    assert "(b of /srv/two.yml)" in result.output


def test_without_any_the_usual_one_is_asked(runtime: Path) -> None:
    result = CliRunner().invoke(main, ["explain", "some-request"])

    assert result.exit_code == 1
    assert f"{runtime}/kvtier.sock" in result.output


def test_engines_are_found_by_the_notes_of_their_deployments(runtime: Path) -> None:
    for number in (1, 2):
        engines = [f"unix:/run/{number}.sock", "unix:/run/both.sock"]
        note_caches(make_runtime_folder(), Path(f"/srv/{number}.yml"), {}, engines)

    assert sorted(find_engines()) == ["unix:/run/1.sock", "unix:/run/2.sock", "unix:/run/both.sock"]


def test_a_runtime_folder_goes_unless_a_part_is_still_in_it(runtime: Path) -> None:
    folder = make_runtime_folder()
    note_caches(folder, Path("/srv/deploy.yml"), {})
    (folder / "cache.sock").touch()
    remove_runtime_folder(folder)
    assert (folder / NOTE_FILE).exists()

    (folder / "cache.sock").unlink()
    remove_runtime_folder(folder)

    assert list(runtime.iterdir()) == []
