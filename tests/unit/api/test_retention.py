"""Retention in each API: the request, the message to the engine, and the usage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvtier.api.anthropic.blocks import CacheMark, Marks
from kvtier.api.config import ApiConfig, ApiKey
from kvtier.api.retention import RetentionRules, RetentionWish, combined
from kvtier.api.retention_fields import needed_parts
from kvtier.blocks.retention import MAX_TTL_S
from kvtier.errors import ConfigError
from kvtier.tiers.retention import RetentionAsk, RetentionOutcome
from tests.support.fake_engine import MODEL, FakeEngine, config_of, fake_engine, http_client, running

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HELLO = [{"role": "user", "content": "one two"}]
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR_MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@dataclass(frozen=True, slots=True)
class Api:
    """A server of one API over an engine that says what it is asked."""

    client: httpx.Client
    engine: FakeEngine

    def post(self, path: str, **fields: object) -> Any:
        reply = self.client.post(path, json={"model": MODEL, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refused(self, path: str, **fields: object) -> str:
        """The sentence."""
        reply = self.client.post(path, json={"model": MODEL, **fields})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        return str(error if isinstance(error, str) else error["message"])

    @property
    def asked(self) -> list[tuple[float, int | None]]:
        return [(ask.ttl_s, ask.num_messages) for ask in self.engine.last.retention]


def serving(api: str) -> Iterator[Api]:
    with tempfile.TemporaryDirectory(prefix="kvt") as name, fake_engine(Path(name)) as engine:
        with running(api, config_of(engine)) as server, http_client(server) as client:
            yield Api(client, engine)


@pytest.fixture(scope="module")
def openai() -> Iterator[Api]:
    yield from serving("openai")


@pytest.fixture(scope="module")
def ollama() -> Iterator[Api]:
    yield from serving("ollama")


def shown(ttl_s: float, priority: int = 50) -> list[dict[str, object]]:
    """The usage from an engine that keeps everything for an hour at most."""
    granted_s = min(ttl_s, 3600.0)
    found: dict[str, object] = {
        "asked": {"tokens": 64, "ttl_s": ttl_s, "priority": priority},
        "granted": {"tokens": 64, "ttl_s": granted_s, "tier": "server"},
    }
    return [found if granted_s == ttl_s else found | {"reason": "an hour at most"}]


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def test_a_chat_asks_by_prompt_cache_retention(openai: Api) -> None:
    reply = openai.post(CHAT, messages=HELLO, prompt_cache_retention="24h", prompt_cache_priority=80)

    assert openai.asked == [(86400.0, None)]
    assert openai.engine.last.retention[0].priority == 80
    assert reply["usage"]["prompt_tokens_details"]["retention"] == shown(86400.0, 80)


def test_a_body_that_asks_for_nothing_is_as_before(openai: Api) -> None:
    reply = openai.post(CHAT, messages=HELLO, prompt_cache_key="a session")

    assert openai.engine.last.retention == []
    assert openai.engine.last.session == "a session"
    assert "retention" not in reply["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize("value", ["in_memory", "in-memory", None])
def test_in_memory_asks_for_nothing(openai: Api, value: object) -> None:
    openai.post(CHAT, messages=HELLO, prompt_cache_retention=value)

    assert openai.asked == []


def test_a_completion_asks_for_each_of_its_prompts(openai: Api) -> None:
    reply = openai.post(COMPLETIONS, prompt=["one two", "three four"], prompt_cache_retention="30m")

    assert [len(submit.retention) for submit in openai.engine.submits[-2:]] == [1, 1]
    [found] = reply["usage"]["prompt_tokens_details"]["retention"]
    assert found["asked"] == {"tokens": 128, "ttl_s": 1800.0, "priority": 50}
    assert found["granted"]["tokens"] == 128


def test_a_stream_says_it_in_its_usage(openai: Api) -> None:
    fields = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    reply = openai.client.post(CHAT, json={"model": MODEL, "prompt_cache_retention": "5m", **fields})

    chunks = [msgspec.json.decode(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["retention"] == shown(300.0)


def test_cache_control_in_messages_marks_how_far(openai: Api) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **HOUR_MARK}]},
        {"role": "user", "content": "one", **MARK},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    openai.post(CHAT, messages=messages)
    assert openai.asked == [(3600.0, 1), (300.0, 2)]

    openai.post(CHAT, messages=messages, prompt_cache_retention="10m")
    assert openai.asked == [(3600.0, 1), (600.0, None)]


def test_a_response_asks_as_a_chat_does(openai: Api) -> None:
    reply = openai.post(RESPONSES, input="one two", prompt_cache_retention="1h")

    assert openai.asked == [(3600.0, None)]
    assert reply["prompt_cache_retention"] == "1h"
    assert reply["usage"]["input_tokens_details"]["retention"] == shown(3600.0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    "value",
    ["", "soon", "0s", "-5m", "8d", "99999999h", "1e3s", "NaN", "5 m", "٣m", "24H", 3600, True, [], {}, "1" * 10_000],
    ids=repr,
)
def test_a_time_that_is_none_is_refused_by_name(openai: Api, path: str, value: object) -> None:
    prompt = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "one"}, RESPONSES: {"input": "one"}}[path]

    sentence = openai.refused(path, **prompt, prompt_cache_retention=value)

    assert sentence.startswith("prompt_cache_retention must ")
    assert len(sentence) < 300


@pytest.mark.parametrize("value", [0, 101, -1, 1.5, "high", [], 1e300], ids=repr)
def test_a_priority_that_is_none_is_refused_by_name(openai: Api, value: object) -> None:
    assert openai.refused(CHAT, messages=HELLO, prompt_cache_priority=value).startswith("prompt_cache_priority must ")


@pytest.mark.parametrize(
    ("mark", "field"),
    [
        ({"type": "ephemeral", "ttl": "1y"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": -5}, "cache_control.ttl"),
        ({"type": "eternal"}, "cache_control.type"),
        ({"ttl": "5m"}, "cache_control.type"),
        ("ephemeral", "cache_control"),
        ([], "cache_control"),
    ],
)
def test_a_mark_that_is_none_is_refused_by_name(openai: Api, mark: object, field: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": mark}]}

    assert openai.refused(CHAT, messages=[message]).startswith(f"messages[0].content[0].{field} ")
    assert openai.refused(MESSAGES, messages=[message], max_tokens=5).startswith(f"messages[0].content[0].{field} ")


# --- Anthropic --------------------------------------------------------------------------------------------------------


def test_messages_mark_how_far_their_prompt_is_kept(openai: Api) -> None:
    reply = openai.post(
        MESSAGES,
        max_tokens=5,
        system=[{"type": "text", "text": "Be brief.", **HOUR_MARK}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": [{"type": "text", "text": "three", **MARK}]},
            {"role": "assistant", "content": "four"},
            {"role": "user", "content": "five"},
        ],
    )

    assert openai.asked == [(3600.0, 1), (300.0, 4)]
    assert reply["usage"]["retention"] == [*shown(3600.0), *shown(300.0)]


def test_a_mark_of_all_keeps_all(openai: Api) -> None:
    openai.post(MESSAGES, max_tokens=5, messages=HELLO, prompt_cache_priority=7, **MARK)

    assert openai.asked == [(300.0, None)]
    assert openai.engine.last.retention[0].priority == 7


def test_tools_are_kept_with_the_first_message() -> None:
    marks = Marks([CacheMark("tools", 0, 3600.0), CacheMark("system", 2, 300.0)])

    assert marks.parts(num_system=0) == [(3600.0, 1)]
    assert marks.parts(num_system=1) == [(3600.0, 1)]


# --- Ollama -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_alive", "ttl_s"),
    [
        *[("5m", 300.0), ("1h30m", 5400.0), (600, 600.0), ("10ms", 1.0), ("90", 90.0)],
        *[(-1, MAX_TTL_S), ("-5m", MAX_TTL_S), (1e300, MAX_TTL_S), ("9" * 60 + "h", MAX_TTL_S)],
    ],
    ids=repr,
)
def test_keep_alive_is_for_the_prompt_too(ollama: Api, keep_alive: object, ttl_s: float) -> None:
    ollama.post("/api/chat", messages=HELLO, stream=False, keep_alive=keep_alive)

    assert ollama.asked == [(ttl_s, None)]


@pytest.mark.parametrize("keep_alive", [0, "0s", None])
def test_without_a_time_nothing_is_kept(ollama: Api, keep_alive: object) -> None:
    ollama.post("/api/generate", prompt="one two", stream=False, keep_alive=keep_alive)

    assert ollama.asked == []


def test_the_last_line_says_what_is_kept(ollama: Api) -> None:
    whole = ollama.post("/api/generate", prompt="one two", stream=False, keep_alive="5m")
    reply = ollama.client.post("/api/chat", json={"model": MODEL, "messages": HELLO, "keep_alive": "5m"})
    lines = [msgspec.json.decode(line) for line in reply.text.splitlines()]

    assert whole["retention"] == shown(300.0)
    assert lines[-1]["retention"] == shown(300.0)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


# --- keys and defaults ------------------------------------------------------------------------------------------------


def test_a_key_has_a_budget_and_defaults_of_its_own() -> None:
    keys = (
        ApiKey(name="ann", key="key-a", retention_s=120.0, retained_bytes=1 << 20),
        ApiKey(name="bob", key="key-b"),
        ApiKey(name="cy", key="key-c", retained_bytes=0),
    )
    with tempfile.TemporaryDirectory(prefix="kvt") as name, fake_engine(Path(name)) as engine:
        config = msgspec.structs.replace(config_of(engine, keys=keys), retention_s=60.0, retention_priority=20)
        with running("openai", config) as server:
            for key, fields in (("key-a", {}), ("key-b", {}), ("key-c", {"prompt_cache_retention": "in_memory"})):
                with http_client(server, key=key) as client:
                    client.post(COMPLETIONS, json={"model": MODEL, "prompt": "one", **fields}).raise_for_status()

    ann, bob, cy = (submit.retention for submit in engine.submits)
    assert ann == [RetentionAsk(ttl_s=120.0, priority=20, account="key ann", account_bytes=1 << 20)]
    assert bob == [RetentionAsk(ttl_s=60.0, priority=20, account="key bob")]
    assert cy == []


def test_a_key_that_may_retain_nothing_has_the_smallest_budget() -> None:
    [ask] = RetentionRules(max_bytes=0).asks(RetentionWish([(60.0, None)]), "key cy")

    assert ask.account_bytes == 1


@pytest.mark.parametrize(
    "settings", [{"retention_s": -1.0}, {"retention_s": float("nan")}, {"retention_s": 1e9}, {"retention_priority": 0}]
)
def test_defaults_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="retention"):
        ApiConfig(models=(), **settings)
    if "retention_s" in settings:
        with pytest.raises(ConfigError, match="retention_s must be"):
            ApiKey(name="ann", key="key-a", **settings)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_that_others_cover_are_left_out() -> None:
    assert needed_parts([(300.0, 1), (300.0, 4), (3600.0, 2), (60.0, 3)]) == [(3600.0, 2), (300.0, 4)]
    assert needed_parts([(300.0, None), (60.0, 5)]) == [(300.0, None)]
    assert needed_parts([]) == []
    assert len(needed_parts([(1000.0 - number, number) for number in range(1, 100)])) == 8


def test_outcomes_of_several_prompts_are_one() -> None:
    one = RetentionOutcome(asked_tokens=32, asked_ttl_s=60.0, priority=5, granted_tokens=32, granted_ttl_s=60.0)
    none = RetentionOutcome(asked_tokens=16, asked_ttl_s=60.0, priority=5, reason="no room")

    assert combined([[one], [none]]) == [
        RetentionOutcome(
            asked_tokens=48, asked_ttl_s=60.0, priority=5, granted_tokens=32, granted_ttl_s=60.0, reason="no room"
        )
    ]
    assert combined([[], []]) == []


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_stays_with_one_engine_whatever_its_prompts_begin_with() -> None:
    with tempfile.TemporaryDirectory(prefix="kvt") as name:
        folder = Path(name)
        with fake_engine(folder) as one, fake_engine(folder, name="engine-1") as other:
            with running("openai", config_of(one, other)) as server, http_client(server) as client:
                for session in range(16):
                    for prompt in ("one two", "three four", "five six"):
                        body = {"model": MODEL, "prompt": prompt, "prompt_cache_key": f"session {session}"}
                        client.post(COMPLETIONS, json=body).raise_for_status()

    of_one, of_other = ([submit.session for submit in engine.submits] for engine in (one, other))
    assert not set(of_one) & set(of_other)
    assert of_one
    assert of_other
    assert len(of_one) + len(of_other) == 48
