"""Who sees the page and its JSON, who may change anything, and what a browser is told to load."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import msgspec
import pytest

from kvtier.api.config import ApiKey, PageConfig
from kvtier.tiers.parting import How, Parting
from tests.support.certificates import make_certificate, needs_openssl
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, running

READER = ApiKey(name="reader", key="reader-key", metrics=True)
ADMIN = ApiKey(name="admin", key="admin-key", admin=True)
PLAIN = ApiKey(name="plain", key="plain-key")
PATHS = ("state", "history", "namespaces", "requests", "requests/x", "warnings", "events")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    engine = FakeEngine(tmp_path_factory.mktemp("page") / "e.sock")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def keyed(engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(engine, keys=(READER, ADMIN, PLAIN), page=PageConfig())) as server:
        yield server


@pytest.fixture(scope="module")
def unkeyed(engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(engine, page=PageConfig())) as server:
        yield server


@contextlib.contextmanager
def log_in(server: Running, key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        response = client.post("/kvtier/v1/session", json={"key": key})
        assert response.status_code == 200, response.text
        client.headers["x-kvtier-csrf"] = response.json()["csrf"]
        yield client


def test_nobody_without_a_key_sees_anything(keyed: Running) -> None:
    with httpx.Client(base_url=keyed.url) as client:
        statuses = {path: client.get(f"/kvtier/v1/{path}").status_code for path in PATHS}
        index = client.get("/")

    assert statuses == dict.fromkeys(PATHS, 401)
    assert index.status_code == 401
    assert "log-in" in index.text
    assert "app.js" not in index.text


def test_a_key_without_metrics_may_not_log_in_or_look(keyed: Running) -> None:
    with httpx.Client(base_url=keyed.url) as client:
        logged_in = client.post("/kvtier/v1/session", json={"key": "plain-key"})
        looked = client.get("/kvtier/v1/state", headers={"authorization": "Bearer plain-key"})

    assert logged_in.status_code == looked.status_code == 403
    assert "set-cookie" not in logged_in.headers


def test_a_key_works_without_a_cookie_too(keyed: Running) -> None:
    response = httpx.get(f"{keyed.url}/kvtier/v1/state", headers={"authorization": "Bearer reader-key"})

    assert response.status_code == 200
    assert response.json()["engines"][0]["model"] == MODEL


def test_the_cookie_is_hidden_from_scripts_and_other_sites(keyed: Running) -> None:
    response = httpx.post(f"{keyed.url}/kvtier/v1/session", json={"key": "reader-key"})

    [cookie] = SimpleCookie(response.headers["set-cookie"]).values()
    assert cookie["httponly"]
    assert cookie["samesite"].lower() == "strict"
    assert cookie["path"] == "/"
    assert "reader-key" not in response.headers["set-cookie"]


def test_a_session_shows_the_page_and_its_data_until_it_ends(keyed: Running) -> None:
    with log_in(keyed, "reader-key") as client:
        assert "app.js" in client.get("/").text
        assert client.get("/kvtier/v1/state").status_code == 200
        [(name, value)] = client.cookies.items()
        assert client.delete("/kvtier/v1/session").status_code == 200

        assert client.get("/kvtier/v1/state", headers={"cookie": f"{name}={value}"}).status_code == 401


def test_a_session_counts_for_the_page_alone(keyed: Running) -> None:
    with log_in(keyed, "admin-key") as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/metrics").status_code == 401


def test_changes_need_the_csrf_token_of_the_session(keyed: Running) -> None:
    with log_in(keyed, "admin-key") as client:
        del client.headers["x-kvtier-csrf"]
        without = client.post("/kvtier/v1/prefixes/p/drop", json={})
        wrong = client.post("/kvtier/v1/prefixes/p/drop", json={}, headers={"x-kvtier-csrf": "x"})
        log_out = client.delete("/kvtier/v1/session")

    assert [one.status_code for one in (without, wrong, log_out)] == [403, 403, 403]
    assert without.json()["error"]["code"] == "wrong_csrf"


def test_changes_need_an_admin(keyed: Running) -> None:
    with log_in(keyed, "reader-key") as reader, log_in(keyed, "admin-key") as admin:
        refused = reader.post("/kvtier/v1/prefixes/p/drop", json={})
        session = admin.get("/kvtier/v1/session").json()

    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "no_admin"
    assert session["may_change"]
    assert session["has_prefixes"]


def test_other_pages_may_not_ask_even_where_the_api_allows_them(engine: FakeEngine) -> None:
    config = config_of(engine, page=PageConfig())
    allowed = type(config)(
        models=config.models, page=config.page, allow_origins=("https://chat.example.com",), drain_s=1.0
    )
    origin = {"origin": "https://chat.example.com"}
    with running("openai", allowed) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/models", headers=origin).status_code == 200
        assert client.get("/kvtier/v1/state", headers=origin).status_code == 403
        assert client.get("/kvtier/v1/state", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.get("/kvtier/v1/state", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_without_keys_a_page_still_has_to_send_the_token(unkeyed: Running) -> None:
    origin = {"origin": unkeyed.url, "sec-fetch-site": "same-origin"}
    with httpx.Client(base_url=unkeyed.url) as client:
        csrf = client.get("/kvtier/v1/session").json()["csrf"]
        without = client.post("/kvtier/v1/prefixes/p/drop", json={}, headers=origin)
        with_it = client.post("/kvtier/v1/prefixes/p/drop", json={}, headers={**origin, "x-kvtier-csrf": csrf})

    assert without.json()["error"]["code"] == "wrong_csrf"
    assert with_it.status_code != 403


def test_a_name_that_was_made_to_point_here_sees_nothing(unkeyed: Running) -> None:
    for path in ("/", "/kvtier/v1/state", "/kvtier/v1/events"):
        assert httpx.get(f"{unkeyed.url}{path}", headers={"host": "evil.example.com"}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/kvtier/v1/state", "/kvtier/v1/nothing"])
def test_every_answer_says_what_a_browser_may_load(unkeyed: Running, path: str) -> None:
    headers = httpx.get(f"{unkeyed.url}{path}").headers

    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


def test_files_of_the_page_have_no_inline_script_or_style() -> None:
    folder = Path(__file__).parents[4] / "src/kvtier/api/page/static"
    for file in folder.glob("*.html"):
        text = file.read_text()
        assert "<style" not in text
        assert " style=" not in text
        assert " on" not in text.replace(" one", "").replace(" only", "")
        assert text.count("<script") == text.count("<script src=")
    for file in folder.glob("*.js"):
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in file.read_text(), f"{word} in {file.name}"


@pytest.mark.parametrize(
    "name", ["../page.py", "..%2fpage.py", "index.html", "login.html", "none.js", "%2e%2e%2fpage.py"]
)
def test_only_the_files_of_the_page_are_served(unkeyed: Running, name: str) -> None:
    assert httpx.get(f"{unkeyed.url}/page/{name}").status_code == 404


def test_a_page_that_is_switched_off_is_not_there(engine: FakeEngine) -> None:
    with running("openai", config_of(engine)) as server, httpx.Client(base_url=server.url) as client:
        for path in ("/", "/page/app.js", *(f"/kvtier/v1/{path}" for path in ("session", *PATHS))):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize("act", ["", "/p/drop", "/p/pin"])
def test_without_a_page_no_browser_may_change_what_is_cached(engine: FakeEngine, act: str) -> None:
    allowed = msgspec.structs.replace(config_of(engine), allow_origins=("https://chat.example.com",))
    with running("openai", allowed) as server, httpx.Client(base_url=server.url) as client:
        for headers in (
            {"origin": "https://chat.example.com"},
            {"origin": "https://chat.example.com", "sec-fetch-site": "cross-site"},
            {"origin": server.url, "sec-fetch-site": "same-origin"},
        ):
            assert client.post(f"/kvtier/v1/prefixes{act}", json={}, headers=headers).status_code == 403
        assert client.post(f"/kvtier/v1/prefixes{act}", json={}).status_code != 403  # a program


@needs_openssl
def test_over_https_a_cookie_is_for_https_alone(engine: FakeEngine, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "page")
    config = msgspec.structs.replace(
        config_of(engine, keys=(READER,), page=PageConfig()), tls_certificate=Path(certificate), tls_key=Path(key)
    )
    with running("openai", config) as server:
        port = server.address[1]
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context) as client:
            response = client.post("/kvtier/v1/session", json={"key": "reader-key"})
            [(name, cookie)] = SimpleCookie(response.headers["set-cookie"]).items()
            assert name == f"__Host-kvtier_{port}"
            assert (cookie["secure"], cookie["path"], cookie["domain"]) == (True, "/", "")
            assert client.get("/kvtier/v1/state").status_code == 200
            client.cookies.clear()
            plain = {"cookie": f"kvtier_{port}={cookie.value}"}  # such a name could come from a page without TLS
            assert client.get("/kvtier/v1/state", headers=plain).status_code == 401


def test_ollamas_port_has_no_page(engine: FakeEngine) -> None:
    with running("ollama", config_of(engine, page=PageConfig())) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/").text == "Ollama is running"
        assert client.get("/kvtier/v1/state").status_code == 404


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"key": 1}', b'{"key": "a", "more": 1}', b"\xff", b'{"key": "\\u00e4"}']
)
def test_odd_log_ins_are_refused_with_a_sentence(keyed: Running, body: bytes) -> None:
    response = httpx.post(f"{keyed.url}/kvtier/v1/session", content=body)

    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_large_log_in_is_refused(keyed: Running) -> None:
    assert httpx.post(f"{keyed.url}/kvtier/v1/session", json={"key": "x" * 100_000}).status_code == 413


def test_wrong_keys_are_answered_more_and_more_slowly_and_counted(keyed: Running) -> None:
    with httpx.Client(base_url=keyed.url) as client:
        statuses = [client.post("/kvtier/v1/session", json={"key": f"no-{number}"}).status_code for number in range(3)]

    assert statuses == [401, 401, 401]
    assert keyed.service.wrong_keys.num_addresses == 1
    metrics = httpx.get(f"{keyed.url}/metrics", headers={"authorization": "Bearer reader-key"}).text
    assert "kvtier_api_wrong_keys_total 3.0" in metrics


@pytest.mark.parametrize("cookie", ["kvtier", "=;;=", "kvtier_1=" + "x" * 5000, "a=b; kvtier_0=é", '"'])
def test_odd_cookies_are_no_session(keyed: Running, cookie: str) -> None:
    headers = {"cookie": cookie.encode()}
    assert httpx.get(f"{keyed.url}/kvtier/v1/state", headers=headers).status_code == 401


def test_text_of_prompts_is_for_its_own_key_and_for_admins(keyed: Running, engine: FakeEngine) -> None:
    answer = httpx.post(
        f"{keyed.url}/v1/completions",
        json={"model": MODEL, "prompt": "a b c"},
        headers={"authorization": "Bearer plain-key"},
    )
    request_id = answer.headers["x-request-id"]
    parting = Parting(how=How.PARTED, token=2, prompt_tokens=3, before="before", recorded="secret", now="other")
    engine.partings[request_id] = parting

    with log_in(keyed, "reader-key") as reader, log_in(keyed, "admin-key") as admin:
        shown = reader.get(f"/kvtier/v1/requests/{request_id}")
        whole = admin.get(f"/kvtier/v1/requests/{request_id}").json()

    assert shown.json()["parting"]["token"] == 2
    assert "secret" not in shown.text
    assert whole["parting"]["recorded"] == "secret"
