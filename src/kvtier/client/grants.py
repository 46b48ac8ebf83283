"""Grants of a server: a lease on blocks, or a reservation of slots. Thread-safe."""

from __future__ import annotations

from typing import Self

from kvtier.client.endpoint import Endpoint
from kvtier.client.server_connection import ServerConnection
from kvtier.errors import TierError, TierFull, TierRefused
from kvtier.wire import messages as wire


class NumberedGrant:
    """A lease or reservation under a number chosen by the client, ended by `ending`. Enter it to ask for it.

    After an error inside, even an interrupt, it is ended as soon as the server answers: the server may have granted it,
    unless it refused.
    """

    def __init__(self, endpoint: Endpoint, ending: type[wire.Release] | type[wire.Close]) -> None:
        self.number = next(endpoint.numbers)
        self._endpoint = endpoint
        self._ending = ending(self.number)
        self._server_id: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, (TierRefused, TierFull)):
            self._endpoint.background.do_later(self._end_now)

    def given_by(self, connection: ServerConnection) -> None:
        self._server_id = connection.welcome.server_id

    def is_held_by(self, connection: ServerConnection) -> bool:
        return self._server_id == connection.welcome.server_id

    def end(self) -> None:
        """End it now, or as soon as the server answers again."""
        try:
            self._end_now()
        except TierError:
            self._endpoint.background.do_later(self._end_now)

    def forget(self) -> None:
        """Like `end`, for the garbage collector."""
        self._endpoint.background.forget(self._end_now)

    def _end_now(self) -> None:
        deadline = self._endpoint.deadline()
        with self._endpoint.connection(deadline) as connection:
            if self._server_id is None or self.is_held_by(connection):  # another server has no such grant
                connection.call(self._ending, wire.Done, deadline)
