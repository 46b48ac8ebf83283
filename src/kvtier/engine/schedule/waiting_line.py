"""The line of requests that wait for the device: clients take turns in it, by the tokens of their prompts. No torch.

With many prompts of one client in front, those of another would wait for all of them. Here each request has a place on
a scale of tokens: its client's last place and the tokens of the prompts there, but no less than the place of the one
that was admitted last (start-time fair queueing). A client alone is served first come, first served; so are clients
with one request each. The engine's thread owns it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvtier.engine.schedule.request import Request

MAX_CLIENTS = 4096
"""Whose places are known; one that is forgotten may come with its next request a little early."""


class _Places(NamedTuple):
    """Of a client: its last prompt's, and its next one's."""

    last: int
    next: int


class WaitingLine(deque[Request]):
    """The first is the next to be admitted; one that was looked at and has to wait goes back to the front."""

    def __init__(self) -> None:
        super().__init__()
        self._admitted_place = 0
        self._of_clients: dict[str, _Places] = {}

    def join(self, request: Request) -> None:
        """Behind those of its own client, and those whose clients have had no more.

        The answers to one prompt stay together, and each of them counts.
        """
        if not self:
            self._of_clients.clear()
        own = self._of_clients.pop(request.client, _Places(0, 0))
        request.place = max(self._admitted_place, own.last if request.index else own.next)
        self._of_clients[request.client] = _Places(request.place, max(request.place, own.next) + request.prompt_tokens)
        if len(self._of_clients) > MAX_CLIENTS:
            del self._of_clients[next(iter(self._of_clients))]
        num_behind = 0
        for other in reversed(self):
            if other.place <= request.place:
                break
            num_behind += 1
        self.insert(len(self) - num_behind, request)

    def note_admitted(self, request: Request) -> None:
        """Who comes from now on and has nothing in the line comes behind it."""
        self._admitted_place = max(self._admitted_place, request.place)
