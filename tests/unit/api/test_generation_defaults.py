"""Who says how to sample: the request, else the deployment, else the model's makers, else the API."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.fake_engine import HELLO, MODEL, config_of, fake_engine, http_client, running

_MAKERS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
_HELLO = msgspec.structs.replace(HELLO, default_options=_MAKERS)


@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        ("openai", "/v1/chat/completions", {"temperature": 0.1}),
        ("ollama", "/api/chat", {"options": {"temperature": 0.1}, "stream": False}),
    ],
)
def test_the_request_is_before_the_deployment_and_that_before_the_models_makers(
    tmp_path: Path, api: str, path: str, body: dict[str, object]
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with fake_engine(tmp_path, hello=_HELLO) as engine:
        config = config_of(engine, default_options={"top_p": 0.5})
        with running(api, config) as server, http_client(server) as client:
            response = client.post(path, json={"model": MODEL, "messages": messages, **body})
        params = engine.last.params

    assert response.status_code == 200, response.text
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.1, 0.5, 20, 1.05)
