"""Keys keep their holders' prompts apart, are named in metrics, and guessing them is slow, for the guesser alone."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.api import wrong_keys
from kvtier.api.access import Access, salt_of
from kvtier.api.config import ApiKey
from kvtier.api.http_error import HttpError
from kvtier.api.limits import (
    FIRST_WRONG_KEY_S,
    LONGEST_WRONG_KEY_S,
    MAX_WRONG_KEY_ADDRESSES,
    MAX_WRONG_KEYS_WAITING_OF_ONE,
    WRONG_KEY_MEMORY_S,
)
from kvtier.api.wrong_keys import WrongKeys, delay_s
from kvtier.errors import ConfigError
from tests.support.fake_engine import FakeEngine, config_of, fake_engine, http_client, running
from tests.support.openai_asking import COMPLETIONS, completion_body, error_of

_KEYS = (
    ApiKey(name="ann", key="key-a"),
    ApiKey(name="bob", key="key-b"),
    ApiKey(name="cy", key="key-c", salt="team"),
    ApiKey(name="di", key="key-d", salt="team"),
    ApiKey(name="ed", key="key-e", share=True),
    ApiKey(name="flo", key="key-f", share=True),
    ApiKey(name="meg", key="key-m", metrics=True),
)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="kvt") as name, fake_engine(Path(name)) as one:
        yield one


# --- salts ------------------------------------------------------------------------------------------------------------


def test_keys_share_blocks_only_if_the_file_says_so(engine: FakeEngine) -> None:
    with running("openai", config_of(engine, keys=_KEYS)) as server:
        for key in _KEYS:
            with http_client(server, key=key.key) as client:
                assert client.post(COMPLETIONS, json=completion_body()).status_code == 200

    ann, bob, cy, di, ed, flo, meg = (submit.salt for submit in engine.submits)
    assert cy == di
    assert ed == flo == ""
    assert len({ann, bob, cy, ed, meg}) == 5


def test_a_key_is_one_client_of_an_engine(engine: FakeEngine) -> None:
    with running("openai", config_of(engine, keys=_KEYS)) as server:
        for key in (_KEYS[0], _KEYS[1], _KEYS[0]):
            with http_client(server, key=key.key) as client:
                assert client.post(COMPLETIONS, json=completion_body()).status_code == 200

    ann, bob, again = (submit.client for submit in engine.submits)
    assert ann == again != bob


def test_without_keys_the_prompts_of_a_request_are_of_one_client(engine: FakeEngine) -> None:
    with running("openai", config_of(engine)) as server, http_client(server) as client:
        for _ in range(2):
            assert client.post(COMPLETIONS, json=completion_body(prompt=["a", "b"])).status_code == 200

    first, second = ({submit.client for submit in engine.submits[begin : begin + 2]} for begin in (0, 2))
    assert len(first) == len(second) == 1
    assert first != second


def test_no_cache_salt_of_one_key_is_the_salt_of_another() -> None:
    tenants = [tenant for _, tenant in Access(_KEYS)._keys]
    given = ["", "x", "\0key bob", "3:x", *(tenant.salt for tenant in tenants)]

    salts = {salt_of(tenant, salt): tenant.salt for tenant in tenants for salt in given}

    assert len(salts) == len({tenant.salt for tenant in tenants}) * len(set(given))


@pytest.mark.parametrize(
    ("fields", "sentence"), [({"salt": "x", "share": True}, "leave share out"), ({"salt": "\0key bob"}, "printable")]
)
def test_a_key_that_contradicts_itself_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ApiKey(name="ann", key="key-a", **fields)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_name_the_keys_of_the_file_and_no_others(engine: FakeEngine) -> None:
    with running("openai", config_of(engine, keys=_KEYS)) as server:
        with http_client(server, key="key-a") as client:
            client.post(COMPLETIONS, json=completion_body("one two three"))
        with http_client(server, key="no-such-key") as client:
            client.post(COMPLETIONS, json=completion_body())
        with http_client(server, key="key-m") as client:
            metrics = client.get("/metrics").text

    assert 'kvtier_api_key_requests_total{key="ann"} 1.0' in metrics
    assert 'kvtier_api_key_tokens_total{key="ann",of="answers"} 3.0' in metrics
    assert "kvtier_api_wrong_keys_total 1.0" in metrics
    assert "no-such-key" not in metrics
    assert "key-a" not in metrics


@pytest.mark.parametrize("api", ["openai", "ollama"])
@pytest.mark.parametrize("host", ["localhost", "rebound.evil.example:8000"])
def test_with_keys_metrics_need_one_that_may_read_them(engine: FakeEngine, api: str, host: str) -> None:
    with running(api, config_of(engine, keys=_KEYS)) as server:
        answers = {}
        for key in (None, "no-such-key", "key-a", "key-m"):
            with http_client(server, key=key) as client:
                answers[key] = client.get("/metrics", headers={"host": host})

    statuses = {key: answer.status_code for key, answer in answers.items()}
    assert statuses == {None: 401, "no-such-key": 401, "key-a": 403, "key-m": 200}
    assert all("kvtier_api_" not in answers[key].text for key in (None, "no-such-key", "key-a"))
    assert "this API key may not read metrics" in answers["key-a"].text
    assert "kvtier_api_wrong_keys_total 1.0" in answers["key-m"].text


@pytest.mark.parametrize("api", ["openai", "ollama"])
def test_with_keys_no_path_but_a_sign_of_life_is_open(engine: FakeEngine, api: str) -> None:
    with running(api, config_of(engine, keys=_KEYS)) as server, http_client(server) as client:
        for path in ("/metrics", "/v1/models", "/api/tags", "/api/ps", "/api/version"):
            assert client.get(path).status_code in (401, 404), path
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


# --- wrong keys -------------------------------------------------------------------------------------------------------


def test_each_wrong_key_takes_longer_than_the_one_before_up_to_a_limit() -> None:
    delays = [delay_s(count) for count in (1, 2, 3, 10, 10_000)]

    assert delays[:3] == [FIRST_WRONG_KEY_S, 2 * FIRST_WRONG_KEY_S, 4 * FIRST_WRONG_KEY_S]
    assert delays[3:] == [LONGEST_WRONG_KEY_S, LONGEST_WRONG_KEY_S]


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


_WRONG = HttpError(401, "the API key is unknown")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays of answers, without waiting for them."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(wrong_keys.asyncio, "sleep", sleep)
    return found


def test_one_address_does_not_slow_down_another_and_is_forgiven_in_time(slept: list[float]) -> None:
    clock = _Clock()
    keys = WrongKeys(clock)

    def guess(*hosts: str) -> None:
        for host in hosts:
            assert asyncio.run(keys.slow_down(host, _WRONG)) is _WRONG

    guess("10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2")
    clock.now += WRONG_KEY_MEMORY_S + 1
    guess("10.0.0.1")

    first = FIRST_WRONG_KEY_S
    assert slept == [first, 2 * first, 4 * first, first, first]


def test_one_network_of_ipv6_is_one_address(slept: list[float]) -> None:
    keys = WrongKeys(_Clock())
    for host in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"):
        asyncio.run(keys.slow_down(host, _WRONG))

    assert keys.num_addresses == 2


def test_what_is_known_of_addresses_is_bounded_and_so_is_the_log(
    slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    keys = WrongKeys(_Clock())

    async def guess_from_everywhere() -> None:
        for number in range(MAX_WRONG_KEY_ADDRESSES + 100):
            await keys.slow_down(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", _WRONG)

    asyncio.run(guess_from_everywhere())

    assert keys.num_addresses == MAX_WRONG_KEY_ADDRESSES
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "wrong API key address=10.0.0.0 count=1"
    assert len(lines) <= 30


def test_guesses_at_once_are_refused_at_once_and_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def guess_at_once() -> list[int]:
        held = asyncio.Event()

        async def sleep(seconds: float) -> None:
            await held.wait()

        monkeypatch.setattr(wrong_keys.asyncio, "sleep", sleep)
        keys = WrongKeys()
        guesses = [asyncio.create_task(keys.slow_down("10.0.0.1", _WRONG)) for _ in range(20)]
        done, waiting = await asyncio.wait(guesses, timeout=0)
        while len(done) < 20 - MAX_WRONG_KEYS_WAITING_OF_ONE:
            done, waiting = await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
        assert len(waiting) == MAX_WRONG_KEYS_WAITING_OF_ONE
        held.set()
        return [(await guess).status for guess in guesses]

    statuses = asyncio.run(guess_at_once())

    assert statuses == [401] * MAX_WRONG_KEYS_WAITING_OF_ONE + [429] * (20 - MAX_WRONG_KEYS_WAITING_OF_ONE)


def test_a_right_key_is_served_while_wrong_ones_from_its_address_wait(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wrong_keys, "FIRST_WRONG_KEY_S", 60.0)
    monkeypatch.setattr(wrong_keys, "LONGEST_WRONG_KEY_S", 2.0)
    answers = []
    with running("openai", config_of(engine, keys=_KEYS)) as server:

        def guess() -> None:
            with http_client(server, key="wrong") as client:
                answers.append(client.post(COMPLETIONS, json=completion_body()))

        guessing = threading.Thread(target=guess, name="guessing")
        guessing.start()
        with http_client(server, key="key-a") as client:
            assert client.post(COMPLETIONS, json=completion_body()).status_code == 200
            assert not answers
        guessing.join()

    assert error_of(answers[0])["code"] == "invalid_api_key"
    assert any("wrong API key address=127.0.0.1" in record.getMessage() for record in caplog.records)
    assert "wrong" not in caplog.text.replace("wrong API key", "").replace("wrong_keys", "")


# --- where a key comes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "key-a"}, 200),
        ({"authorization": "Bearer key-a"}, 200),
        ({"authorization": "bearer  key-a"}, 200),
        ({"authorization": "Basic key-a", "x-api-key": "key-a"}, 200),
        ({"authorization": "Basic key-a"}, 401),
        ({"x-api-key": "key-x"}, 401),
        ({"authorization": "Bearer key-x", "x-api-key": "key-a"}, 401),
    ],
)
def test_a_key_comes_as_openais_or_as_anthropics_clients_send_it(
    engine: FakeEngine, headers: dict[str, str], status: int
) -> None:
    with running("openai", config_of(engine, keys=_KEYS)) as server, http_client(server) as client:
        assert client.get("/v1/models", headers=headers).status_code == status
