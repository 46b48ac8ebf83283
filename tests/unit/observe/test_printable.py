"""Text that a terminal shows and does not obey."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.observe.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with é and 漢字", "plain, with é and 漢字"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("one\ntwo\r", "one\\ntwo\\r"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\x9b31m"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_no_plain_character_is_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(), max_size=50))
def test_any_text_is_one_line(text: str) -> None:
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert all(character.isprintable() or character.isspace() for character in shown)
    shown.encode()


def test_a_long_text_is_cut() -> None:
    assert printable("x" * 10**6, 10) == "x" * 9 + "…"
