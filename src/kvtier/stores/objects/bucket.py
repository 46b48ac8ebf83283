"""An object store with deadlines: `obstore` on threads of ours, so no caller waits beyond its deadline. Thread-safe.

An abandoned call goes on until the store's own limit; its result is thrown away. No buffer of a caller is handed to it:
the caller copies the bytes after checking them.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

from kvtier.errors import ConfigError, TierError, TierRefused, TierTimeout, TierUnavailable

_Answer = TypeVar("_Answer")

_THREADS = 16


class Bucket:
    """The objects below `url`. Raises `ConfigError` for a URL or settings that `obstore` does not know."""

    def __init__(self, url: str, settings: Mapping[str, str], *, limit_s: float, allow_http: bool) -> None:
        """`limit_s` is how long the store itself tries; `settings` are obstore's, in addition to the environment's."""
        try:
            import obstore  # noqa: PLC0415  # of the extra `objects`
            from obstore.exceptions import (  # noqa: PLC0415
                BaseError,
                PermissionDeniedError,
                UnauthenticatedError,
            )
            from obstore.store import from_url  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError("an object store needs obstore: pip install 'kvtier[objects]'") from error
        self._obstore = obstore
        self._refusals = (PermissionDeniedError, UnauthenticatedError)
        self._failures = (BaseError, OSError, ValueError)
        limit = datetime.timedelta(seconds=limit_s)
        options: dict[str, Any] = {}
        if url.startswith("file:"):
            options["mkdir"] = True
        else:
            options["config"] = dict(settings)
            options["client_options"] = {"timeout": limit, "connect_timeout": limit, "allow_http": allow_http}
            options["retry_config"] = {"max_retries": 1, "retry_timeout": limit}
        try:
            self._store: Any = from_url(url, **options)
        except self._failures as error:
            raise ConfigError(f"object store {url}: {_first_line(error)}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # raised by obstore for settings that it did not expect there
                raise
            raise ConfigError(f"object store {url}: obstore cannot use these settings") from error
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_THREADS, "kvtier-objects")

    def read(self, name: str, start: int, end: int) -> bytes | None:
        """These bytes of an object; None if there is none, empty if it ends before. Waits up to the store's limit."""
        began_at = time.monotonic()
        try:
            return self._do(lambda store: self._obstore.get_range(store, name, start=start, end=end))
        except TierUnavailable:
            if time.monotonic() - began_at < self._limit_s / 2:  # otherwise it hangs, and would again
                meta = self._do(lambda store: self._obstore.head(store, name))
                if meta is not None and meta["size"] < end:
                    return b""
            raise

    def read_all(self, wanted: Sequence[tuple[str, int, int]], deadline: float) -> list[bytes | None]:
        """Several `read` calls at once. Raises the error of the first that failed, or `TierTimeout`."""
        return self._wait([self._submit(self.read, *one) for one in wanted], deadline)

    def write(self, name: str, parts: Sequence[bytes]) -> None:
        """Write an object as a whole or not at all."""
        self._do(lambda store: self._obstore.put(store, name, parts, use_multipart=False))

    def delete(self, names: Sequence[str], deadline: float) -> None:
        """Delete objects; missing ones count as deleted."""
        self._wait([self._submit(self._delete, name) for name in names], deadline)

    def list_names(self, prefix: str) -> list[str]:
        """Has no deadline: meant for commands, not for requests."""
        listed = self._do(lambda store: self._obstore.list(store, prefix).collect())
        return [meta["path"] for meta in listed or []]

    def close(self) -> None:
        """Calls in flight end by themselves, at the store's limit. Connections are closed with the last of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store = None

    def _submit(self, act: Callable[..., _Answer], *arguments: object) -> Future[_Answer | _Failure]:
        try:
            return self._threads.submit(_told, act, *arguments)
        except RuntimeError:
            raise TierUnavailable("the object store is closed") from None

    def _delete(self, name: str) -> None:
        self._do(lambda store: self._obstore.delete(store, name))

    def _do(self, act: Callable[[Any], _Answer]) -> _Answer | None:
        store = self._store
        if store is None:
            raise TierUnavailable("the object store is closed")
        try:
            return act(store)
        except FileNotFoundError:
            return None
        except self._refusals as error:
            raise TierRefused(f"the object store refused: {_first_line(error)}") from None
        except Exception as error:
            raise TierUnavailable(f"the object store failed: {_first_line(error)}") from None

    def _wait(self, calls: list[Future[_Answer | _Failure]], deadline: float) -> list[_Answer]:
        waiting = wait(calls, max(0.0, deadline - time.monotonic())).not_done
        for call in waiting:
            call.cancel()
        if waiting:
            raise TierTimeout("the object store did not answer in time")
        answers: list[_Answer] = []
        for answer in (call.result() for call in calls):
            if isinstance(answer, _Failure):
                raise answer.kind(answer.sentence)
            answers.append(answer)
        return answers


class _Failure(NamedTuple):
    """A call's failure on another thread, in words: an exception would keep the caller's frames, and views, alive."""

    kind: type[TierError]
    sentence: str


def _told(act: Callable[..., _Answer], *arguments: object) -> _Answer | _Failure:
    try:
        return act(*arguments)
    except TierError as error:
        return _Failure(type(error), str(error))


def _first_line(error: Exception) -> str:
    """The first line of an error that may go on for many, including all that was sent."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
