"""Shared by the tests of `kvtier serve`: a deployment's text, questions over both APIs, traffic.

A request ends in one of the ways of `Way`; which of them are right is for the test to say. Everything is greedy: a
question has one right answer.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvtier.testing.tiny_models import save_tiny_model
from tests.support.deployments import DeploymentProcess
from tests.support.waiting import LIMIT_S, wait_until

MODEL = "tiny"
MAX_MODEL_LEN = 4096
TEXT = """\
models:
  - model: tiny
    kv_cache_space: 32MiB
    always_load: true
cache:
  memory: 64MiB
  disk: 64MiB
  folder: cache
"""
"""One model with a cache server that has a disk. What is cached is loaded, however fast the tiny model computes."""

QUESTIONS = [f"{number}: what is the meaning of the number {number * 7919}? " * 3 for number in range(8)]
ANSWER_TOKENS = 40


def save_model(folder: Path, **overrides: Any) -> None:
    save_tiny_model(folder, "llama", max_position_embeddings=MAX_MODEL_LEN, **overrides)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    output_tokens: int
    cached: Mapping[str, int]

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())


def body_of(prompt: str | Sequence[int], max_tokens: int, *, model: str = MODEL, **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}


def client_of(deployment: DeploymentProcess, *, key: str | None = None) -> httpx.Client:
    """A client that keeps no connection."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(
        base_url=deployment.openai_url, headers=headers, limits=limits, timeout=LIMIT_S, trust_env=False
    )


def ask(
    deployment: DeploymentProcess,
    prompt: str | Sequence[int],
    max_tokens: int = ANSWER_TOKENS,
    *,
    model: str = MODEL,
    key: str | None = None,
) -> Answer:
    """Over the OpenAI API, not streamed. Raises for everything but an answer."""
    with client_of(deployment, key=key) as client:
        response = client.post("/v1/completions", json=body_of(prompt, max_tokens, model=model))
    response.raise_for_status()
    document = response.json()
    usage = document["usage"]
    return Answer(
        document["choices"][0]["text"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens_by_tier"],
    )


def right_answers(deployment: DeploymentProcess, *, key: str | None = None) -> dict[str, str]:
    """To all questions, each asked alone."""
    return {question: ask(deployment, question, key=key).text for question in QUESTIONS}


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- streams ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def streaming(
    deployment: DeploymentProcess, prompt: str, max_tokens: int, *, key: str | None = None
) -> Iterator[Iterator[str]]:
    """A stream of so many tokens, whose first one came. Iterate for its texts; at the end of the scope it is closed."""
    body = body_of(prompt, max_tokens, stream=True, ignore_eos=True)
    with (
        client_of(deployment, key=key) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        texts = _texts(response)
        first = next(texts)
        yield itertools.chain([first], texts)


def _texts(response: httpx.Response) -> Iterator[str]:
    """Raises `AssertionError` for a stream that does not end as it should."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            yield chunk["choices"][0]["text"]
    raise AssertionError("the stream was cut")


# --- traffic ----------------------------------------------------------------------------------------------------------


class Way(enum.Enum):
    """How a request ended. REFUSED and BROKEN_OFF are errors in the API's own shape, CUT is a lost connection."""

    RIGHT = "right"
    REFUSED = "refused"
    BROKEN_OFF = "broken off"
    CUT = "cut"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Outcome:
    way: Way
    what: str
    ended_at: float = field(default_factory=time.monotonic)


class Traffic:
    """Threads that ask, over both APIs, streamed and not, until the scope ends; every request has an outcome."""

    def __init__(
        self,
        deployment: DeploymentProcess,
        answers: Mapping[str, str],
        *,
        num_threads: int = 6,
        pause_s: float = 0.0,
        key: str | None = None,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._pause_s = pause_s
        self._key = key
        self._deployment = deployment
        self._answers = answers
        self._is_over = threading.Event()
        self._kinds = [self._openai, self._openai_stream, self._ollama_stream]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"traffic-{number}")
            for number in range(num_threads)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.wait_for_right_answers(2 * len(self._threads))
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    @property
    def ways(self) -> set[Way]:
        return {outcome.way for outcome in self.outcomes}

    def count(self, way: Way) -> int:
        return Counter(outcome.way for outcome in self.outcomes)[way]

    def wait_for_right_answers(self, count: int) -> None:
        """So many more of them."""
        wanted = self.count(Way.RIGHT) + count
        wait_until(lambda: self.count(Way.RIGHT) >= wanted, f"{count} right answers, but {self.told()}")

    def told(self) -> list[str]:
        """The errors of requests without an answer, each once."""
        return sorted({f"{one.way.value}: {one.what}" for one in self.outcomes if one.way is not Way.RIGHT})

    def _run(self, number: int) -> None:
        questions = itertools.cycle(QUESTIONS[number:] + QUESTIONS[:number])
        kinds = itertools.cycle(self._kinds[number % 3 :] + self._kinds[: number % 3])
        with client_of(self._deployment, key=self._key) as client:
            while not self._is_over.is_set():
                question = next(questions)
                try:
                    outcome = next(kinds)(client, question)
                except httpx.TransportError as error:
                    outcome = Outcome(Way.CUT, type(error).__name__)
                except Exception as error:
                    outcome = Outcome(Way.WRONG, repr(error))
                self.outcomes.append(outcome)
                self._is_over.wait(self._pause_s if outcome.way is Way.RIGHT else 0.05)

    def _judged(self, question: str, text: str) -> Outcome:
        if text == self._answers[question]:
            return Outcome(Way.RIGHT, text)
        return Outcome(Way.WRONG, f"{question!r} was answered with {text!r}")

    def _openai(self, client: httpx.Client, question: str) -> Outcome:
        response = client.post("/v1/completions", json=body_of(question, ANSWER_TOKENS))
        if response.status_code != 200:
            return _refusal(response, response.json()["error"]["message"])
        return self._judged(question, response.json()["choices"][0]["text"])

    def _openai_stream(self, client: httpx.Client, question: str) -> Outcome:
        body = body_of(question, ANSWER_TOKENS, stream=True)
        text = ""
        with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return _refusal(response, json.loads(response.read())["error"]["message"])
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return self._judged(question, text)
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return Outcome(Way.BROKEN_OFF, chunk["error"]["message"])
                    text += chunk["choices"][0]["text"]
        return Outcome(Way.CUT, "no end of the stream")

    def _ollama_stream(self, client: httpx.Client, question: str) -> Outcome:
        options = {"temperature": 0, "num_predict": ANSWER_TOKENS}
        body = {"model": MODEL, "prompt": question, "raw": True, "options": options}
        text = ""
        with client.stream("POST", f"{self._deployment.ollama_url}/api/generate", json=body) as response:
            if response.status_code != 200:
                return _refusal(response, json.loads(response.read())["error"])
            for line in response.iter_lines():
                chunk = json.loads(line)
                if "error" in chunk:
                    return Outcome(Way.BROKEN_OFF, chunk["error"])
                text += chunk["response"]
                if chunk["done"]:
                    return self._judged(question, text)
        return Outcome(Way.CUT, "no end of the stream")


def _refusal(response: httpx.Response, sentence: str) -> Outcome:
    """An error that a client can do something with: ask again later."""
    is_clear = response.status_code in (429, 503) and int(response.headers["retry-after"]) > 0 and sentence
    return Outcome(Way.REFUSED if is_clear else Way.WRONG, f"{response.status_code}: {sentence}")
