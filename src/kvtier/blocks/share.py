"""One owner's part of a pool that several share."""

from __future__ import annotations


class Share:
    """One owner's part of a pool, in units. The pool counts the `used` units, and the `pinned` ones among them.

    At most `max_pinned` units may be pinned, and `max_retained` retained; None leaves the limit to the pool.
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
