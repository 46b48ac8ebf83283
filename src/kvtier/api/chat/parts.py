"""The parts of an answer, piece by piece as its text arrives; every chat API encodes them in its own form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The start of a tool call, which ends the part before it; `number` counts the calls of an answer from 0."""

    number: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of call `number`, which is always the newest one."""

    number: int
    text: str


AnswerPart = TextPart | ReasoningPart | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class WholeCall:
    call_id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class WholeParts:
    """A complete answer. `text` and `reasoning` are empty if the answer has none."""

    text: str
    reasoning: str
    calls: tuple[WholeCall, ...]
