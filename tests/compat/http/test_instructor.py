"""Instructor, over each API, in the modes that it has for tools and for schemas."""

from __future__ import annotations

import anthropic
import instructor
import openai
import pytest

from tests.compat.http.conftest import Stand
from tests.compat.http.weather import QUESTION, Forecast


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_answer_follows_the_schema(stand: Stand, model: str, mode: instructor.Mode) -> None:
    with openai.OpenAI(base_url=stand.v1, api_key="none", max_retries=0) as client:
        answer = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], response_model=Forecast, max_retries=0
        )

    assert isinstance(answer, Forecast)


def test_an_answer_over_anthropics_api_follows_the_schema(stand: Stand, model: str) -> None:
    with anthropic.Anthropic(base_url=stand.openai_url, api_key="none", max_retries=0) as client:
        answer = instructor.from_anthropic(client).messages.create(
            model=model,
            max_tokens=4096,
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Forecast,
            max_retries=0,
        )

    assert isinstance(answer, Forecast)
