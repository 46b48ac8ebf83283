"""A web page reaches this server only by a name of ours, and only if its origin may ask; over TLS too."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from kvtier.api.config import ApiConfig, ApiKey
from kvtier.api.web_guard import OLLAMA_ORIGINS, WebRules
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, http_client, running

_GENERATE = {"model": MODEL, "prompt": "one two", "stream": False, "raw": True}
_COMPLETION = {"model": MODEL, "prompt": "one two"}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="kvt") as name, fake_engine(Path(name)) as one:
        yield one


@pytest.fixture(scope="module")
def config(engine: FakeEngine) -> ApiConfig:
    return msgspec.structs.replace(
        config_of(engine), allow_hosts=("chat.example.com",), allow_origins=("https://ui.example.com",)
    )


@pytest.fixture(scope="module")
def openai(config: ApiConfig) -> Iterator[Running]:
    with running("openai", config) as server:
        yield server


@pytest.fixture(scope="module")
def ollama(config: ApiConfig) -> Iterator[Running]:
    with running("ollama", config) as server:
        yield server


def post(server: Running, **headers: str) -> httpx.Response:
    is_ollama = "/api/" in _path(server)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    with http_client(server) as client:
        return client.post(_path(server), json=_GENERATE if is_ollama else _COMPLETION, headers=given)


def _path(server: Running) -> str:
    with http_client(server) as client:
        return "/api/generate" if client.get("/api/version").status_code == 200 else "/v1/completions"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("app.localhost", 200),
        ("127.0.0.1:1", 200),
        ("10.1.2.3", 200),
        ("[::1]:8080", 200),
        ("chat.example.com", 200),
        ("chat.example.com.:80", 200),
        ("evil.example.com", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("x" * 300, 403),
    ],
)
def test_a_server_is_called_by_its_names_and_by_any_address(openai: Running, host: str, status: int) -> None:
    answer = post(openai, host=host)

    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "unknown_host"
        assert len(answer.json()["error"]["message"]) < 200


def test_whoever_watches_the_server_may_call_it_by_any_name(openai: Running) -> None:
    with http_client(openai) as client:
        statuses = {
            path: client.get(path, headers={"host": "lb.example"}).status_code
            for path in ("/health", "/ready", "/metrics")
        }

    assert statuses == {"/health": 200, "/ready": 200, "/metrics": 403}


def test_with_keys_any_name_will_do(config: ApiConfig) -> None:
    keyed = msgspec.structs.replace(config, keys=(ApiKey(name="alice", key="secret"),))
    with running("openai", keyed) as server:
        assert post(server, host="evil.example.com").status_code == 401
        assert post(server, host="evil.example.com", authorization="Bearer secret").status_code == 200


def test_on_a_network_the_machine_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu1.lab.example")

    def rules(host: str) -> WebRules:
        return WebRules.make(listens_on=[host], allow_hosts=["*.corp.example"], allow_origins=[], has_keys=False)

    assert [rules("0.0.0.0").allows_host(name) for name in ("gpu1.lab.example", "gpu1", "gpu2")] == [True, True, False]
    assert not rules("127.0.0.1").allows_host("gpu1")
    assert rules("gpu9.lab.example").allows_host("gpu9.lab.example:8080")
    assert rules("::1").allows_host("a.corp.example")
    assert not rules("::1").allows_host("corp.example")


@pytest.mark.parametrize(
    ("origin", "on_openai", "on_ollama"),
    [
        ("https://ui.example.com", 200, 200),
        ("https://evil.example", 403, 403),
        ("http://localhost:3000", 403, 200),
        ("http://127.0.0.1", 403, 200),
        ("https://localhost.evil.example", 403, 403),
        ("app://obsidian.md", 403, 200),
        ("null", 403, 403),
    ],
)
def test_a_page_asks_if_its_origin_may(
    openai: Running, ollama: Running, origin: str, on_openai: int, on_ollama: int
) -> None:
    for server, status in ((openai, on_openai), (ollama, on_ollama)):
        answer = post(server, origin=origin)

        assert answer.status_code == status
        assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


def test_a_page_that_came_from_here_may_ask_here(openai: Running) -> None:
    assert post(openai, origin="http://localhost:99", host="localhost:99").status_code == 200


def test_openai_paths_on_ollamas_port_follow_ollamas_rule(ollama: Running) -> None:
    with http_client(ollama) as client:
        answer = client.post("/v1/completions", json=_COMPLETION, headers={"origin": "http://localhost:3000"})

    assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_page_must_say_that_it_sends_json_and_a_program_need_not(ollama: Running, kind: str) -> None:
    content = msgspec.json.encode(_GENERATE)
    with http_client(ollama) as client:
        from_page = client.post(
            "/api/generate", content=content, headers={"origin": "http://localhost", "content-type": kind}
        )
        from_program = client.post("/api/generate", content=content, headers={"content-type": kind})

    assert from_page.status_code == 415
    assert from_program.status_code == 200


@pytest.mark.parametrize(("origin", "status"), [("https://ui.example.com", 204), ("https://evil.example", 403)])
def test_a_preflight_is_answered_for_origins_that_may_ask(openai: Running, origin: str, status: int) -> None:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    with http_client(openai) as client:
        answer = client.options("/v1/chat/completions", headers=asked)

    assert answer.status_code == status
    if status == 204:
        assert answer.headers["access-control-allow-origin"] == origin
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]


def test_a_star_stands_for_every_page() -> None:
    rules = WebRules.make(listens_on=["127.0.0.1"], allow_hosts=["*"], allow_origins=["*"], has_keys=False)

    assert rules.allows_host("anything.example")
    assert rules.allows_origin("https://anything.example", "localhost")
    assert not WebRules.make(
        listens_on=["127.0.0.1"], allow_hosts=[], allow_origins=OLLAMA_ORIGINS, has_keys=False
    ).allows_origin("https://anything.example", "localhost")


@pytest.mark.parametrize("origins", [("*",), ("https://ui.example.com",)])
def test_a_page_never_gets_to_use_the_browsers_credentials(engine: FakeEngine, origins: tuple[str, ...]) -> None:
    origin = {"origin": "https://ui.example.com"}
    with (
        running("openai", msgspec.structs.replace(config_of(engine), allow_origins=origins)) as server,
        http_client(server) as client,
    ):
        answers = [
            client.options("/v1/completions", headers={**origin, "access-control-request-method": "POST"}),
            client.post("/v1/completions", json=_COMPLETION, headers=origin),
        ]

    assert [answer.status_code for answer in answers] == [204, 200]
    assert not any("access-control-allow-credentials" in answer.headers for answer in answers)


def test_without_settings_no_page_may_ask_the_openai_port(engine: FakeEngine) -> None:
    with running("openai", config_of(engine)) as server:
        for origin in ("http://localhost:3000", "https://ui.example.com", "app://obsidian.md"):
            answer = post(server, origin=origin)

            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("form", ["http://{}", "https://{}", "http://{}:5173", "https://{}:1"])
def test_ollamas_port_lets_pages_of_this_machine_ask(host: str, form: str) -> None:
    rules = WebRules.make(listens_on=["127.0.0.1"], allow_hosts=[], allow_origins=OLLAMA_ORIGINS, has_keys=False)

    assert rules.allows_origin(form.format(host), "localhost:11434")
    assert not rules.allows_origin(f"http://{host}.evil.example", "localhost:11434")
    assert not rules.allows_origin(f"https://{host}evil.example:80", "localhost:11434")


@pytest.mark.parametrize("scheme", ["app", "file", "tauri", "vscode-webview", "vscode-file"])
def test_ollamas_port_lets_desktop_applications_ask(scheme: str) -> None:
    rules = WebRules.make(listens_on=["127.0.0.1"], allow_hosts=[], allow_origins=OLLAMA_ORIGINS, has_keys=False)

    assert rules.allows_origin(f"{scheme}://anything", "localhost:11434")
    assert not rules.allows_origin(f"not-{scheme}://anything", "localhost:11434")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_both_apis_speak_tls_with_a_certificate(config: ApiConfig, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=server"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    trusting = ssl.create_default_context(cafile=str(certificate))
    secure = msgspec.structs.replace(config, tls_certificate=certificate, tls_key=key)
    for api, path, body in (
        ("openai", "/v1/completions", _COMPLETION),
        ("ollama", "/api/generate", _GENERATE),
    ):
        with running(api, secure) as server:
            url = server.url.replace("http://", "https://")
            answer = httpx.post(f"{url}{path}", json=body, verify=trusting, trust_env=False)
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{server.url}/health", trust_env=False)

        assert answer.status_code == 200
