"""What an answer consists of, piece by piece as its text comes: every chat API shows these in its own words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """More of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model thinks before it says something."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool; `number` counts the calls of an answer from 0. What came before it is over."""

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
    """All of an answer. `text` and `reasoning` are empty where there is none."""

    text: str
    reasoning: str
    calls: tuple[WholeCall, ...]
