"""One owner's part of a pool that several share."""

from __future__ import annotations


class Share:
    """One owner's part of a pool, in its units. The pool counts what is used, and what of that is pinned.

    At most `max_pinned` may be, and `max_retained` be retained; None leaves that to the pool.
    """

    __slots__ = ("max_pinned", "max_retained", "name", "pinned", "quota", "used")

    def __init__(self, name: str = "", quota: int = 0) -> None:
        self.name = name
        self.quota = quota
        self.used = 0
        self.pinned = 0
        self.max_pinned: int | None = None
        self.max_retained: int | None = None

    @property
    def excess(self) -> int:
        return self.used - self.quota
