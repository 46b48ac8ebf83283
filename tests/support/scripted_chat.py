"""An engine without a model that answers a conversation with a given text, in pieces of a few characters."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvtier.engine.process.messages import Accepted, EngineHello, Submit
from tests.support.fake_engine import HELLO, Script, Step, ending, said

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
NUM_PROMPT_TOKENS = 7


def hello_with(template: str, special_tokens: dict[str, int] | None = None) -> EngineHello:
    return msgspec.structs.replace(HELLO, chat_template=template, special_tokens=special_tokens or {})


def saying(text: str, *, piece: int = 3, prompt_end: str = "", reason: str = "stop") -> Script:
    """A token for each `piece` characters."""
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]

    def script(submit: Submit) -> Iterator[Step]:
        yield Accepted(submit.number, NUM_PROMPT_TOKENS, prompt_end)
        for number, one in enumerate(pieces):
            is_last = number == len(pieces) - 1
            yield said(submit, one, completion=ending(reason, len(pieces)) if is_last else None)

    return script
