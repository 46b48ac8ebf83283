"""An engine whose canary has found wrong KV says so in `/ready` and `/health`; it serves all the same."""

from __future__ import annotations

from pathlib import Path

from kvtier.api.engine_connection import ProbeTimes
from tests.support.fake_engine import config_of, fake_engine, http_client, running, wait_until

_OFTEN = ProbeTimes(ask_every_s=0.05, hung_after_s=60.0)


def test_ready_and_health_say_that_nothing_is_loaded(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine, running("openai", config_of(engine), _OFTEN) as server:
        connection = server.service.engines.connections[0]
        with http_client(server) as client:
            assert client.get("/health").json() == {"status": "ok"}
            engine.loading_off = "the canary found wrong KV"
            wait_until(lambda: bool(connection.loading_off))

            ready = client.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (200, "ready")
            (state,) = ready.json()["models"]["tiny"].values()
            assert state["loading_off"] == "the canary found wrong KV"
            assert client.get("/health").json() == {
                "status": "ok",
                "warnings": [f"{connection.name}: the canary found wrong KV"],
            }

            engine.loading_off = ""
            wait_until(lambda: not connection.loading_off)
            assert client.get("/health").json() == {"status": "ok"}
