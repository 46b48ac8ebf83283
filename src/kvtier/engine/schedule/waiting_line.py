"""The line of requests that wait for the device: clients take turns, by the tokens of their prompts. No torch.

If many prompts of one client were in front, another client would wait for all of them. Instead, each request has a
place on a scale of tokens: its client's last place plus the tokens of the prompts there, but no less than the place of
the last admitted request (start-time fair queueing). A single client is served first come, first served; so are clients
with one request each. Owned by the engine's thread.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvtier.engine.schedule.request import Request

MAX_CLIENTS = 4096
"""Clients whose places are known; a forgotten client's next request may come a little early."""


class _Places(NamedTuple):
    """A client's places: of its last prompt, and of its next one."""

    last: int
    next: int


class WaitingLine(deque[Request]):
    """The first is the next to be admitted; a request that was tried and has to wait goes back to the front."""

    def __init__(self) -> None:
        super().__init__()
        self._admitted_place = 0
        self._of_clients: dict[str, _Places] = {}

    def join(self, request: Request) -> None:
        """Behind requests of its own client, and of clients that were served no more than it.

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
        """From now on, a client with nothing in the line joins at this place or behind it."""
        self._admitted_place = max(self._admitted_place, request.place)
