"""The names of prefixes: kept over restarts, whole after a kill, bounded, encrypted with a key."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kvtier.api.prefixes.book import MAX_PREFIXES, PrefixBook, new_file
from kvtier.api.prefixes.record import PrefixContent, PrefixRecord, PrefixText
from kvtier.errors import ConfigError

SECRET_TEXT = "the text of the handbook"


def record_of(name: str, **fields: object) -> PrefixRecord:
    values = {
        "name": name,
        "model": "tiny",
        "namespace": "ab" * 32,
        "root": "ab" * 32,
        "first": "cd" * 32,
        "tokens": 40,
        "blocks": 2,
        "file": new_file(),
        "has_text": True,
    }
    return PrefixRecord(**{**values, **fields})  # type: ignore[arg-type]


def content_of(text: str = SECRET_TEXT) -> PrefixContent:
    return PrefixContent(b"\1" * 64, PrefixText([text], "Be brief."))


def test_names_and_texts_are_there_after_a_restart(tmp_path: Path) -> None:
    book = PrefixBook(tmp_path / "p")
    record = record_of("handbook", is_pinned=True, expires_at=5.0)
    book.add(record, content_of())
    again = PrefixBook(tmp_path / "p")
    assert list(again) == [record]
    assert again.content(record) == content_of()
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "p").iterdir())


def test_a_changed_name_a_removed_one_and_one_that_is_replaced(tmp_path: Path) -> None:
    book = PrefixBook(tmp_path)
    one = record_of("one")
    book.add(one, content_of("1"))
    book.add(record_of("two"), content_of("2"))
    book.add(record_of("two"), content_of("3"))
    assert book.rename(one, "uno") == book.rename(one, "uno") == book.get("uno")
    with pytest.raises(ConfigError, match="a prefix two already exists"):
        book.rename(one, "two")
    book.remove(one)
    for act in (lambda: book.remove(one), lambda: book.rename(one, "eins"), lambda: book.change(one, hits=1)):
        with pytest.raises(ConfigError, match="has been dropped"):
            act()
    [left] = PrefixBook(tmp_path)
    assert left.name == "two"
    content = PrefixBook(tmp_path).content(left)
    assert content is not None
    assert content.text == PrefixText(["3"], "Be brief.")
    assert len(list(tmp_path.iterdir())) == 2  # the names, and one file


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_prefix_without_text_keeps_that_of_the_same_prefix_before(tmp_path: Path, is_on_disk: bool) -> None:
    book = PrefixBook(tmp_path if is_on_disk else None)
    book.add(record_of("handbook"), content_of())
    imported = record_of("handbook", has_text=False)
    stored = book.add(imported, PrefixContent(b"\1" * 64))

    assert stored == book.get("handbook") == msgspec.structs.replace(imported, has_text=True)
    assert book.content(stored) == content_of()


@pytest.mark.parametrize(
    ("fields", "hashes"),
    [({"model": "other"}, b"\1"), ({"root": "ef" * 32}, b"\1"), ({"key": "another's"}, b"\1"), ({}, b"\2")],
)
def test_a_prefix_without_text_gets_none_of_another_prefix(fields: dict[str, str], hashes: bytes) -> None:
    book = PrefixBook()
    book.add(record_of("handbook"), content_of())
    stored = book.add(record_of("handbook", has_text=False, **fields), PrefixContent(hashes * 64))

    assert not stored.has_text
    assert book.content(stored) == PrefixContent(hashes * 64)


def test_a_book_without_a_folder_is_in_memory() -> None:
    book = PrefixBook()
    record = record_of("handbook")
    book.add(record, content_of())
    assert book.content(record) == content_of()
    book.remove(record)
    assert len(book) == 0


@pytest.mark.parametrize("failing", ["names.json", "texts"])
def test_a_prefix_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = PrefixBook(tmp_path)
    book.add(record_of("one"), content_of("1"))
    before = sorted(path.name for path in tmp_path.iterdir())
    with a_full_disk(monkeypatch, lambda name: name.startswith("names") == (failing == "names.json")):
        for _ in range(3):
            with pytest.raises(ConfigError, match="No space left on device"):
                book.add(record_of("two"), content_of("2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert [record.name for record in book] == ["one"]
    book.add(record_of("two"), content_of("2"))


def test_a_prefix_can_be_dropped_on_a_disk_without_room_for_the_new_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = PrefixBook(tmp_path)
    record = record_of("one")
    book.add(record, content_of("1"))
    with a_full_disk(monkeypatch, lambda name: any(tmp_path.glob("*.prefix"))):
        book.remove(record)
    assert list(PrefixBook(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["names.json"]


@contextlib.contextmanager
def a_full_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[str], bool]) -> Iterator[None]:
    """While a file is written and `is_full` of its name, there is no room for it once it is open."""
    sync = os.fsync

    def refuse(fd: int) -> None:
        if is_full(Path(os.readlink(f"/proc/self/fd/{fd}")).name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        yield


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version":2,"prefixes":[]}', b"[" * 100_000, b"\0" * 100])
def test_damaged_names_are_set_aside(tmp_path: Path, damage: bytes) -> None:
    PrefixBook(tmp_path).add(record_of("handbook"), content_of())
    (tmp_path / "names.json").write_bytes(damage)
    assert len(PrefixBook(tmp_path)) == 0
    [aside] = tmp_path.glob("names.damaged-*")
    assert aside.read_bytes() == damage


def test_no_text_is_lost_with_names_that_cannot_be_read(tmp_path: Path) -> None:
    record = record_of("handbook")
    PrefixBook(tmp_path).add(record, content_of())
    names = (tmp_path / "names.json").read_bytes()
    (tmp_path / "names.json").write_bytes(names[:-10])
    later = record_of("later")
    for _ in range(2):
        book = PrefixBook(tmp_path)
        assert book.content(record) == content_of()
    book.add(later, content_of("more"))
    assert PrefixBook(tmp_path).content(record) == content_of()

    [aside] = tmp_path.glob("names.damaged-*")
    aside.unlink()
    assert list(PrefixBook(tmp_path)) == [later]
    assert [path.name for path in tmp_path.glob("*.prefix")] == [f"{later.file}.prefix"]


def test_a_folder_without_names_loses_no_text(tmp_path: Path) -> None:
    record = record_of("handbook")
    PrefixBook(tmp_path).add(record, content_of())
    (tmp_path / "names.json").unlink()
    assert PrefixBook(tmp_path).content(record) == content_of()


def test_another_prefix_under_the_same_name_is_not_removed_in_its_place(tmp_path: Path) -> None:
    book = PrefixBook(tmp_path)
    before, after = record_of("handbook"), record_of("handbook")
    book.add(before, content_of("1"))
    book.add(after, content_of("2"))
    with pytest.raises(ConfigError, match="has been dropped"):
        book.remove(before)
    assert list(book) == [after]


def test_hits_are_noted_while_the_names_are_written(tmp_path: Path) -> None:
    book = PrefixBook(tmp_path)
    record = record_of("handbook")
    book.add(record, content_of())
    book.note_hits(record, 1, 5.0)
    changed = book.change(record, is_pinned=True)
    assert (changed.hits, changed.last_used, changed.is_pinned) == (1, 5.0, True)
    book.note_hits(record_of("handbook"), 1, 6.0)  # of another prefix that had the name
    assert list(PrefixBook(tmp_path)) == [changed]


def test_texts_may_be_read_by_many_threads_at_once(tmp_path: Path) -> None:
    book = PrefixBook(tmp_path)
    records = [record_of(f"p{number}") for number in range(24)]
    for record in records:
        book.add(record, content_of(record.name))

    def read(place: int) -> bool:
        record = records[place * 7 % len(records)]
        return book.content(record) == content_of(record.name)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(2000)))


@pytest.mark.parametrize("name", ["", "../names", "a b", "<b>", "-x", "é", "x" * 129, "a\n", "a/b", ".hidden"])
def test_a_name_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a prefix's name must have at most"):
        record_of(name)


def test_a_damaged_or_missing_text_is_told_apart_from_an_empty_one(tmp_path: Path) -> None:
    record = record_of("handbook")
    PrefixBook(tmp_path).add(record, content_of())
    [file] = tmp_path.glob("*.prefix")
    file.write_bytes(b"\xc1")
    assert PrefixBook(tmp_path).content(record) is None
    file.unlink()
    assert PrefixBook(tmp_path).content(record) is None


def test_there_is_a_limit_to_names_and_to_texts(tmp_path: Path) -> None:
    book = PrefixBook()
    for number in range(MAX_PREFIXES):
        book.add(record_of(f"p{number}"), PrefixContent(b"\1" * 32))
    with pytest.raises(ConfigError, match="1024 named prefixes already"):
        book.add(record_of("more"), content_of())
    book = PrefixBook(tmp_path)
    book.max_all_bytes = 300
    book.add(record_of("one"), content_of())
    with pytest.raises(ConfigError, match="together are too large"):
        book.add(record_of("two"), content_of("x" * 300))
    with pytest.raises(ValueError, match="more than 1024 documents"):
        PrefixText(["x"] * 1025)
    with pytest.raises(ValueError, match="needs documents"):
        PrefixText([""])


def test_with_a_key_nothing_can_be_read_without_it(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(secrets.token_hex(32))
    record = record_of("handbook")
    PrefixBook(tmp_path / "p", tmp_path / "right").add(record, content_of())
    for path in (tmp_path / "p").iterdir():
        assert SECRET_TEXT.encode() not in path.read_bytes()
        assert b"handbook" not in path.read_bytes()
    assert PrefixBook(tmp_path / "p", tmp_path / "right").content(record) == content_of()
    book = PrefixBook(tmp_path / "p", tmp_path / "wrong")
    assert len(book) == 0
    other = record_of("other")
    book.add(other, content_of("more"))

    book = PrefixBook(tmp_path / "p", tmp_path / "right")
    assert list(book) == [record]
    assert book.content(record) == content_of()


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    PrefixBook(tmp_path).add(record_of("handbook"), content_of())
    (tmp_path / "names.json.new").write_bytes(b"half")
    (tmp_path / f"{new_file()}.prefix").write_bytes(b"nobody's")
    assert len(PrefixBook(tmp_path)) == 1
    assert len(list(tmp_path.iterdir())) == 2


_WRITER = """
import sys
from pathlib import Path
from tests.unit.api.prefixes.test_book import content_of, record_of
from kvtier.api.prefixes.book import PrefixBook

book = PrefixBook(Path(sys.argv[1]))
print("begun", flush=True)
number = 0
while True:
    number += 1
    name = f"p{number % 5}"
    book.add(record_of(name, tokens=number), content_of(str(number)))
    if number % 3 == 0:
        book.remove(book.get(name))
"""


@pytest.mark.slow
def test_a_book_whose_writer_was_killed_at_any_moment_is_whole(tmp_path: Path) -> None:
    for number in range(5):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
            time.sleep(0.007 * number)
            writer.send_signal(signal.SIGKILL)
        book = PrefixBook(tmp_path)
        assert not list(tmp_path.glob("*damaged*"))
        for record in book:
            content = book.content(record)
            assert content is not None
            assert content.text == PrefixText([str(record.tokens)], "Be brief.")
