"""The programs' requests: a tool and a form of answer, both so narrow that random weights soon reach an end."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TOOL = "get_weather"
DESCRIPTION = "How the weather will be."
CALLED: dict[str, Any] = {"place": "Oslo", "days": 3}
"""With these arguments the model `caller` calls the tool, of itself."""

ANSWER = "It will be 4 degrees in Oslo."
"""The answer after the result."""

QUESTION = "What will the weather be like in Oslo in three days?"
SYSTEM = "You are a careful assistant. Use what the tools tell you."


class Asked(BaseModel):
    """Arguments of the tool."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Oslo", "Paris", "Quito"]
    days: Annotated[int, Field(ge=0, le=9)]


class Forecast(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Oslo", "Paris", "Quito"]
    celsius: Literal[-5, 0, 5, 20]
    is_wet: bool


PARAMETERS: dict[str, Any] = Asked.model_json_schema()
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS, "strict": True},
}
RESPONSES_TOOL: Any = {"type": "function", **CHAT_TOOL["function"]}
ANTHROPIC_TOOL: Any = {"name": TOOL, "description": DESCRIPTION, "input_schema": PARAMETERS}
OLLAMA_TOOL: Any = {
    "type": "function",
    "function": {"name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS},
}


def forecast(place: str, days: int) -> str:
    """The tool's result."""
    return json.dumps({"place": place, "days": days, "celsius": 7 - days, "sky": "clouds from the west"})
