from __future__ import annotations

from typing import cast

import pytest

from kvtier.client.admin import ServerAdmin
from kvtier.client.endpoint import Endpoint
from kvtier.errors import TierUnavailable
from kvtier.wire import messages as wire


class Unwilling:
    """Of a server that answers every request with the same sentence."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def call(self, request: wire.Request, reply_type: type) -> wire.Reply:
        raise TierUnavailable(self._sentence)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("the cache server gave up: a message that cannot be read: Invalid value 37", "older than this command"),
        ("nobody listens there", "nobody listens there"),
    ],
)
def test_a_server_that_does_not_know_the_question_is_called_old(said: str, told: str) -> None:
    with pytest.raises(TierUnavailable, match=told):
        ServerAdmin(cast(Endpoint, Unwilling(said))).traffic(0)
