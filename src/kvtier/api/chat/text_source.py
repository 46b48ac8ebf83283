"""Text that comes in pieces, for readers that are generators: each yields where it needs more text than there is.

A reader never goes back, and what waits here is at most a mark, a name or a token of JSON that a piece has cut: the
time for an answer grows with its length, however it is cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

_Found = TypeVar("_Found")

Reading = Generator[None, None, _Found]
"""A step of a reader. It is resumed when more text has come, or none comes any more."""

Show = Callable[[str], None]

MAX_WORD_CHARACTERS = 256
"""Of the name of a tool or of a parameter."""

_SPACES = re.compile(r"\s+")


class TextSource:
    """`num_taken` is how many characters were read."""

    def __init__(self) -> None:
        self.num_taken = 0
        self._text = ""
        self._at = 0
        self._is_over = False

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._is_over = True

    def take(self, count: int) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        self.num_taken += len(taken)
        return taken

    def match(self, pattern: re.Pattern[str]) -> int:
        """How many of the characters that have come `pattern` matches."""
        found = pattern.match(self._text, self._at)
        return 0 if found is None else found.end() - self._at

    def reach(self, count: int) -> Reading[bool]:
        """Wait for this many characters; False if they do not come."""
        while self._num_here < count and not self._is_over:
            yield
        return self._num_here >= count

    def peek(self) -> Reading[str]:
        """The next character, which is not taken; empty at the end."""
        yield from self.reach(1)
        return self._text[self._at : self._at + 1]

    def starts_with(self, mark: str) -> Reading[bool]:
        """Whether the text goes on with `mark`, which is not taken."""
        for count in range(1, len(mark) + 1):
            if not (yield from self.reach(count)) or not self._text.startswith(mark[:count], self._at):
                return False
        return True

    def skip(self, mark: str) -> Reading[bool]:
        """Take `mark`, if the text goes on with it."""
        is_there = yield from self.starts_with(mark)
        if is_there:
            self.take(len(mark))
        return is_there

    def spaces(self) -> Reading[str]:
        """Take white space."""
        taken = []
        while (yield from self.peek()) and (count := self.match(_SPACES)):
            taken.append(self.take(count))
        return "".join(taken)

    def until(self, marks: tuple[str, ...], show: Show) -> Reading[str]:
        """Show text up to the first of `marks`, and take that mark, which is returned; empty where none comes.

        An end of the text that may be the beginning of a mark waits for more.
        """
        while True:
            found = _any_of(marks).search(self._text, self._at)
            if found is not None:
                self._show(found.start() - self._at, show)
                return self.take(len(found[0]))
            if self._is_over:
                self._show(self._num_here, show)
                return ""
            self._show(self._num_here - max(self._num_begun(mark) for mark in marks), show)
            yield

    def rest(self, show: Show) -> Reading[None]:
        """Show all that comes."""
        while (yield from self.peek()):
            self._show(self._num_here, show)

    def word(self, ends: tuple[str, ...]) -> Reading[str]:
        """Take a short text before one of `ends`, which is not taken; empty, and nothing is taken, where none comes."""
        most = MAX_WORD_CHARACTERS + max(map(len, ends))
        while True:
            found = _any_of(ends).search(self._text, self._at, self._at + most)
            if found is not None:
                return self.take(found.start() - self._at)
            if self._is_over or self._num_here >= most:
                return ""
            yield

    @property
    def _num_here(self) -> int:
        return len(self._text) - self._at

    def _show(self, count: int, show: Show) -> None:
        if count:
            show(self.take(count))

    def _num_begun(self, mark: str) -> int:
        """How many characters of the text's end may be the beginning of the mark."""
        for count in range(min(len(mark) - 1, self._num_here), 0, -1):
            if self._text.endswith(mark[:count]):
                return count
        return 0


@functools.lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
