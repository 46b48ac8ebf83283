"""`with` for caches; a cache stays open if an error leaves arrays of its tensors in use."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from kvtier.errors import LeaseError

logger = logging.getLogger(__name__)


class ClosedAtExit:
    """Closed at the end of a `with`. An error of the program is not replaced there by one of `close`."""

    def close(self) -> None:
        """Raises `LeaseError`, and stays open, while arrays or views of tensors are in use."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except LeaseError:
            if error is None:
                raise
            logger.warning("arrays of cached tensors are still in use after an error; the cache stays open")
