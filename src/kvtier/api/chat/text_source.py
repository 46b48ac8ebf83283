"""Text that arrives in pieces, for readers that are generators: a reader yields when it needs more text.

A reader never goes back, and the text that waits here is at most a marker, a name or a JSON token cut by a piece's
end. So the time to read an answer is linear in its length, however it is cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

_Found = TypeVar("_Found")

Reading = Generator[None, None, _Found]
"""A step of a reader. It is resumed when more text has arrived, or at the end of the text."""

Show = Callable[[str], None]

MAX_WORD_CHARACTERS = 256
"""Limit for the name of a tool or of a parameter."""

_SPACES = re.compile(r"\s+")


class TextSource:
    """The text of one answer; `num_taken` counts the characters that were read."""

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

    def ahead(self, count: int) -> str:
        """The next characters, without taking them."""
        return self._text[self._at : self._at + count]

    def match(self, pattern: re.Pattern[str]) -> int:
        """How many of the next characters `pattern` matches, among those that have arrived."""
        found = pattern.match(self._text, self._at)
        return 0 if found is None else found.end() - self._at

    def reach(self, count: int) -> Reading[bool]:
        """Wait for this many characters; False if the text ends before."""
        while self._num_here < count and not self._is_over:
            yield
        return self._num_here >= count

    def peek(self) -> Reading[str]:
        """The next character, without taking it; empty at the end."""
        yield from self.reach(1)
        return self._text[self._at : self._at + 1]

    def starts_with(self, mark: str) -> Reading[bool]:
        """Whether the text continues with `mark`, without taking it."""
        for count in range(1, len(mark) + 1):
            if not (yield from self.reach(count)) or not self._text.startswith(mark[:count], self._at):
                return False
        return True

    def skip(self, mark: str) -> Reading[bool]:
        """Take `mark`, if the text continues with it."""
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
        """Show text up to the first of `marks`; take and return that mark, or an empty text if none arrives.

        A possible start of a mark at the end of the text is held back until more arrives.
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
        """Show all text up to the end."""
        while (yield from self.peek()):
            self._show(self._num_here, show)

    def word(self, ends: tuple[str, ...]) -> Reading[str]:
        """Take a short text up to one of `ends`, without that end; empty, with nothing taken, if none arrives."""
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
        """How many characters at the text's end may be the start of `mark`."""
        for count in range(min(len(mark) - 1, self._num_here), 0, -1):
            if self._text.endswith(mark[:count]):
                return count
        return 0


@functools.lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
