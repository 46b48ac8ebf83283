"""Ask a running deployment over its OpenAI API, with nothing but the standard library, and time the first token."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_QUESTION = "What is this about?"
DEFAULT_MAX_TOKENS = 8
_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Answer:
    """`ttft_s` is from sending the request to the first token's arrival; `cached` are the prompt's tokens by tier."""

    ttft_s: float
    text: str
    prompt_tokens: int
    cached: dict[str, int] = field(default_factory=dict)
    request_id: str = ""

    @property
    def sources(self) -> str:
        return ", ".join(f"{count} tokens from {tier}" for tier, count in self.cached.items() if count) or "computed"


class Refused(Exception):
    """The server returned an error instead of an answer."""


def ask(
    url: str,
    model: str,
    document: str,
    *,
    question: str = DEFAULT_QUESTION,
    max_tokens: int = DEFAULT_MAX_TOKENS,
) -> Answer:
    """Send a document, if there is one, with a question; the answer is greedy.

    Raises `Refused` if the answer is an error or breaks off, `ConnectionError` if no server listens.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{document}\n\n{question}" if document else question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=_TIMEOUT_S)
    data = json.dumps(body).encode()
    started_at = time.perf_counter()
    try:
        _connect(connection, url)
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Refused(f"{response.status}: {response.read().decode(errors='replace')}")
        return _read(response, started_at)
    except http.client.HTTPException as error:
        raise Refused(f"{url} did not answer to the end: {error!r}") from error
    finally:
        connection.close()


def _connect(connection: http.client.HTTPConnection, url: str) -> None:
    try:
        connection.connect()
    except OSError as error:
        raise ConnectionError(
            f"{url} cannot be reached ({error.strerror or error}): is the deployment running? kvtier serve deploy.yml"
        ) from error


def _read(response: http.client.HTTPResponse, started_at: float) -> Answer:
    ttft_s, text = 0.0, ""
    usage: dict[str, object] = {}
    request_id = response.headers.get("x-request-id", "")
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        ttft_s = ttft_s or time.perf_counter() - started_at
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise Refused(chunk["error"]["message"])
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
        usage = chunk.get("usage") or usage
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens_by_tier") if isinstance(details, dict) else None
    prompt_tokens = usage.get("prompt_tokens")
    return Answer(
        ttft_s,
        text,
        prompt_tokens if isinstance(prompt_tokens, int) else 0,
        dict(cached) if isinstance(cached, dict) else {},
        request_id,
    )


def ready_since(url: str) -> dict[str, float] | None:
    """When each engine became ready; None until all of them are, and while no server answers."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            document = json.load(response)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return None
    return {
        engine: float(state["since"]) for engines in document["models"].values() for engine, state in engines.items()
    }
