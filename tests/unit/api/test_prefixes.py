"""Named prefixes over HTTP: warmed, listed, kept, dropped, renamed, and named by requests."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvtier.api.config import ApiKey, CacheAddress
from kvtier.api.prefixes.cache import PrefixCache
from kvtier.api.prefixes.warming import Pace
from kvtier.blocks.hashing import block_hashes, salted_root, split_hashes
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.connecting import connect
from kvtier.client.room import Room
from kvtier.engine.process.messages import ChatPrompt
from kvtier.transport.address import TcpAddress, UnixAddress
from kvtier.wire.messages import LISTED_PINNED
from tests.support.fake_engine import Running, held, http_client, running, wait_until
from tests.support.openai_asking import CHAT, chat_body, error_of
from tests.support.storing_engine import BLOCK_TOKENS, LAYOUT, StoringEngine, fields_of, storing_engine, tokens_of

PREFIXES = "/kvtier/v1/prefixes"
DOCUMENT = " ".join(f"word{number}" for number in range(200))
KEYS = (
    ApiKey(name="root", key="key-root", admin=True, share=True),
    ApiKey(name="ann", key="key-ann", share=True),
    ApiKey(name="bob", key="key-bob"),
    ApiKey(name="eve", key="key-eve", metrics=True),
)


@pytest.fixture
def below(tmp_path: Path) -> Iterator[StoringEngine]:
    with storing_engine(tmp_path) as one:
        yield one


@pytest.fixture
def server(below: StoringEngine) -> Iterator[Running]:
    with running("openai", below.config()) as one:
        yield one


def warm(client: httpx.Client, **fields: object) -> list[dict[str, Any]]:
    """The events of a warm-up."""
    body = {"name": "handbook", "documents": [DOCUMENT], **fields}
    response = client.post(PREFIXES, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event.startswith("data: ")]
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in events]


def hashes_of_chat(below: StoringEngine, prompt: ChatPrompt, salt: str = "") -> list[Any]:
    """The hashes of the full blocks that all chats with this beginning share."""
    tokens = tokens_of(prompt)
    return block_hashes(salted_root(fields_of().digest(), salt), tokens, BLOCK_TOKENS)


def test_what_is_warmed_is_hit_by_a_chat_that_begins_with_the_document(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        events = warm(client, system="Be brief.")
        assert events[-1]["prefix"]["name"] == "handbook"
        assert events[-1]["prefix"]["tokens"] == 204  # the role, two words, the role, the document
        assert events[-2] == {"done_tokens": 204, "all_tokens": 204}
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{DOCUMENT}\n\nWho?"}]
        client.post(CHAT, json=chat_body() | {"messages": messages}).raise_for_status()
    prompt = below.engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    hashes = hashes_of_chat(below, prompt)[: 204 // BLOCK_TOKENS]
    assert all(below.client.contains(hashes))


def test_a_request_may_name_a_prefix_instead_of_sending_its_text(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client, system="Be brief.")
        client.post(CHAT, json=chat_body("Who wrote it?", prefix="handbook")).raise_for_status()
        named = below.engine.last.prompt
        body = {"model": "tiny", "input": "Who wrote it?", "prefix": "handbook"}
        client.post("/v1/responses", json=body).raise_for_status()
        response = below.engine.last.prompt
        body = {"model": "tiny", "max_tokens": 5, "messages": chat_body("Who wrote it?")["messages"]}
        client.post("/v1/messages", json={**body, "prefix": "handbook"}).raise_for_status()
        message = below.engine.last.prompt
        counted = client.post("/v1/messages/count_tokens", json={k: v for k, v in body.items() if k != "max_tokens"})
        whole = client.post(
            "/v1/messages/count_tokens",
            json={"model": "tiny", "messages": body["messages"], "prefix": "handbook"},
        )
        listed = client.get(PREFIXES).json()["prefixes"][0]
    assert isinstance(named, ChatPrompt)
    assert [one.role for one in named.messages] == ["system", "user"]
    assert named.messages[1].content == f"{DOCUMENT}\n\nWho wrote it?"
    assert isinstance(response, ChatPrompt)
    assert isinstance(message, ChatPrompt)
    assert response.messages == message.messages == named.messages
    assert whole.json()["input_tokens"] > counted.json()["input_tokens"] + 200
    assert (listed["name"], listed["hits"]) == ("handbook", 3)
    assert listed["last_used"] > 0


def test_a_request_to_ollamas_api_may_name_a_prefix(below: StoringEngine) -> None:
    config = below.config()
    with running("openai", config) as openai, http_client(openai) as client:
        warm(client, system="Be brief.")
        name = {"model": "tiny", "stream": False, "prefix": "handbook"}
        question = [{"role": "user", "content": "Who wrote it?"}]
        with running("ollama", config) as ollama, http_client(ollama) as asking:
            asking.post("/api/chat", json={**name, "messages": question}).raise_for_status()
            chat = below.engine.last.prompt
            asking.post("/api/generate", json={**name, "prompt": "Who wrote it?"}).raise_for_status()
            generated = below.engine.last.prompt
    assert isinstance(chat, ChatPrompt)
    assert isinstance(generated, ChatPrompt)
    assert [one.role for one in chat.messages] == ["system", "user"]
    assert chat.messages[1].content == f"{DOCUMENT}\n\nWho wrote it?"
    assert generated.messages == chat.messages


def test_a_large_body_may_name_a_prefix(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client)
        question = "why " * 20_000
        client.post(CHAT, json=chat_body(question, prefix="handbook")).raise_for_status()
    prompt = below.engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content == f"{DOCUMENT}\n\n{question}"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (chat_body("Who?", prefix="nothing"), "there is no prefix called 'nothing' here"),
        (
            {**chat_body(prefix="handbook"), "messages": [{"role": "system", "content": "a"}]},
            "the first message must have the role user",
        ),
        (chat_body("Who?", prefix=7), "prefix must be text"),
        (chat_body("Who?", prefix=""), "prefix must be the name of a prefix"),
        (chat_body("Who?", prefix="x" * 129), "at most 128 characters"),
    ],
)
def test_a_prefix_that_cannot_be_used_is_refused(server: Running, body: dict[str, Any], sentence: str) -> None:
    with http_client(server) as client:
        warm(client)
        response = client.post(CHAT, json=body)
    assert response.status_code in (400, 404)
    assert sentence in error_of(response)["message"]


def test_only_what_is_absent_is_computed(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client)
        computed = list(below.computed)
        assert computed[-1] == 200  # of 201 tokens, 50 blocks
        events = warm(client, name="again")
        assert below.computed == computed
        assert events[0] == {"done_tokens": 200, "all_tokens": 200}
        longer = warm(client, name="longer", documents=[DOCUMENT, DOCUMENT])
        assert longer[0] == {"done_tokens": 200, "all_tokens": 400}


def test_what_was_dropped_is_computed_again(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client)
        assert client.post(f"{PREFIXES}/handbook/drop").json() == {"dropped_blocks": 50}
        assert client.get(f"{PREFIXES}/handbook").status_code == 404
        before = len(below.computed)
        warm(client)
    assert len(below.computed) > before


def test_all_of_a_namespace_is_dropped_and_names_can_be_warmed_again(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client, pin=True)
        namespace = client.get(PREFIXES).json()["prefixes"][0]["namespace"]
        assert client.post(f"/kvtier/v1/namespaces/{namespace}/drop").json() == {"dropped_blocks": 50}
        [named] = client.get(PREFIXES).json()["prefixes"]
        assert (named["name"], named["bytes"], named["pinned_blocks"]) == ("handbook", 0, 0)
        assert not below.client.list_blocks()
        assert warm(client)[-1]["prefix"]["pinned_blocks"] == 50
        unknown = client.post("/kvtier/v1/namespaces/nonsense/drop")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "namespace_not_found")


def test_prefixes_are_listed_with_where_they_are(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client, pin=True, ttl_s=3600)
        listed = client.get(PREFIXES).json()
        cut = client.get(f"{PREFIXES}?limit=1").json()
        wrong = client.get(f"{PREFIXES}?limit=-1")
    named, whole = listed["prefixes"]
    assert named["is_pinned"]
    assert named["expires_at"] > 0
    assert named["blocks"] == 50
    assert named["bytes"] == 50 * 4096
    assert named["bytes_by_tier"] == {"server": 50 * 4096, "disk": 50 * 4096}
    assert (whole["name"], whole["model"], whole["blocks"]) == (None, "tiny", 50)
    assert not listed["is_cut"]
    assert cut["is_cut"]
    assert len(cut["prefixes"]) == 1
    assert wrong.status_code == 400


def test_pins_come_and_go_and_names_change(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client)
        assert client.post(f"{PREFIXES}/handbook/pin").json()["prefix"]["is_pinned"]
        assert below.client.stats()["pinned_bytes"] == 50 * 4096
        assert not client.post(f"{PREFIXES}/handbook/unpin").json()["prefix"]["is_pinned"]
        assert below.client.stats()["pinned_bytes"] == 0
        renamed = client.post(f"{PREFIXES}/handbook/rename", json={"name": "manual"}).json()
        assert renamed["prefix"]["name"] == "manual"
        assert client.post(f"{PREFIXES}/handbook/pin").status_code == 404
        warm(client)
        taken = client.post(f"{PREFIXES}/handbook/rename", json={"name": "manual"})
        bad = client.post(f"{PREFIXES}/handbook/rename", json={"name": "<script>"})
    assert taken.status_code == 409
    assert "a prefix manual already exists" in taken.text
    assert bad.status_code == 400


def test_a_pinned_name_stays_pinned_when_it_is_warmed_again(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client, pin=True)
        again = warm(client, documents=[DOCUMENT + DOCUMENT])[-1]["prefix"]
        assert again["is_pinned"]
        assert below.client.stats()["pinned_bytes"] == again["blocks"] * 4096

        client.post(f"{PREFIXES}/handbook/unpin").raise_for_status()
        assert not warm(client)[-1]["prefix"]["is_pinned"]
        assert below.client.stats()["pinned_bytes"] == 0


def test_a_pin_that_the_cache_has_lost_is_not_shown(below: StoringEngine) -> None:
    with running("openai", below.config()) as server, http_client(server) as client:
        warm(client, pin=True)
        hashes = split_hashes(bytes.fromhex(client.get(f"{PREFIXES}/handbook").json()["hashes"]))
    below.client.unpin(hashes[40:])
    with running("openai", below.config()) as server, http_client(server) as client:
        lost = client.get(PREFIXES).json()["prefixes"][0]
        pinned = client.post(f"{PREFIXES}/handbook/pin").json()["prefix"]
    assert (lost["is_pinned"], lost["pinned_blocks"]) == (False, 40)
    assert (pinned["is_pinned"], pinned["pinned_blocks"]) == (True, 50)


def test_a_name_whose_blocks_are_all_gone_can_be_unpinned_and_dropped(below: StoringEngine, tmp_path: Path) -> None:
    with running("openai", below.config()) as server, http_client(server) as client:
        warm(client, pin=True)
    folder = tmp_path / "other"
    folder.mkdir()
    with storing_engine(folder) as other:
        other.client.close()  # nothing has used that cache yet
        config = msgspec.structs.replace(other.config(), prefix_folder=below.folder / "prefixes")
        with running("openai", config) as server, http_client(server) as client:
            assert not client.get(PREFIXES).json()["prefixes"][0]["is_pinned"]
            unpinned = client.post(f"{PREFIXES}/handbook/unpin")
            dropped = client.post(f"{PREFIXES}/handbook/drop")
    assert unpinned.status_code == 200, unpinned.text
    assert dropped.json() == {"dropped_blocks": 0}


def test_what_another_prefix_needs_stays_pinned_and_stays(server: Running, below: StoringEngine) -> None:
    with http_client(server) as client:
        warm(client, pin=True)
        warm(client, name="longer", documents=[DOCUMENT, DOCUMENT], pin=True)
        client.post(f"{PREFIXES}/longer/unpin").raise_for_status()
        assert below.client.stats()["pinned_bytes"] == 50 * 4096
        assert client.post(f"{PREFIXES}/longer/drop").json() == {"dropped_blocks": 50}
        client.post(f"{PREFIXES}/handbook/drop").raise_for_status()
        assert below.client.stats()["pinned_bytes"] == 0


def test_a_pin_that_the_cache_refuses_leaves_the_pin_of_a_prefix_with_the_same_beginning(tmp_path: Path) -> None:
    with (
        storing_engine(tmp_path, memory=1 << 20) as below,
        running("openai", below.config()) as server,
        http_client(server) as client,
    ):
        warm(client, pin=True)
        warm(client, name="longer", documents=[DOCUMENT] * 3)
        refused = client.post(f"{PREFIXES}/longer/pin")
        left = {one["name"]: one["pinned_blocks"] for one in client.get(PREFIXES).json()["prefixes"]}
    assert refused.status_code == 409
    assert "may be pinned" in refused.text
    assert (left["handbook"], left["longer"]) == (50, 50)


def test_a_request_with_the_text_itself_is_a_hit_like_one_that_names_it(below: StoringEngine) -> None:
    with running("openai", below.config()) as server, http_client(server) as client:
        warm(client)
        warm(client, name="another", documents=["Something else entirely. " * 20])
        before = client.get(PREFIXES).json()["prefixes"]
        client.post(CHAT, json=chat_body(f"{DOCUMENT}\n\nWho?")).raise_for_status()
        client.post(CHAT, json=chat_body("Who?")).raise_for_status()
        listed = client.get(PREFIXES).json()["prefixes"]
        client.post(CHAT, json=chat_body("Who?", prefix="handbook")).raise_for_status()
        again = client.get(PREFIXES).json()["prefixes"]
    assert {one["name"]: one["hits"] for one in before if one["name"]} == {"another": 0, "handbook": 0}
    assert {one["name"]: one["hits"] for one in listed if one["name"]} == {"another": 0, "handbook": 1}
    assert {one["name"]: one["last_used"] is None for one in listed if one["name"]} == {
        "another": True,
        "handbook": False,
    }
    assert {one["name"]: one["hits"] for one in again if one["name"]} == {"another": 0, "handbook": 2}


@pytest.mark.parametrize("act", ["pin", "unpin"])
def test_a_pin_that_was_confirmed_survives_a_crash_of_the_cache_server(
    below: StoringEngine, server: Running, tmp_path: Path, act: str
) -> None:
    """A copy of its folder is what a process that is killed leaves behind."""
    with http_client(server) as client:
        warm(client, pin=act == "unpin")
        below.client.flush()
        client.post(f"{PREFIXES}/handbook/{act}").raise_for_status()
        shutil.copytree(tmp_path / "cache", tmp_path / "left")
        listed = below.client.list_blocks()
    socket = UnixAddress(str(tmp_path / "left.sock"))
    config = CacheServerConfig(memory_bytes=8 << 20, unix=socket, folder=tmp_path / "left", file_bytes=64 << 20)
    with (
        contextlib.closing(CacheServer(config)),
        connect(f"unix:{socket.path}", layout=LAYOUT, namespace=fields_of(), name="tiny") as again,
    ):
        flags = again.presence(below.namespace, [block_hash for block_hash, _ in listed])
    assert len(flags) == 50
    assert [bool(each & LISTED_PINNED) for each in flags] == [act == "pin"] * 50


def test_names_outlive_the_server(below: StoringEngine) -> None:
    with running("openai", below.config()) as server, http_client(server) as client:
        warm(client, pin=True)
        client.post(CHAT, json=chat_body("Who?", prefix="handbook")).raise_for_status()
    with running("openai", below.config()) as server, http_client(server) as client:
        [named, _] = client.get(PREFIXES).json()["prefixes"]
        client.post(CHAT, json=chat_body("Who?", prefix="handbook")).raise_for_status()
    assert named["is_pinned"]
    assert named["hits"] == 1
    prompt = below.engine.last.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content.startswith("word0 word1")


def test_traffic_comes_first_but_warming_goes_on(server: Running, below: StoringEngine) -> None:
    server.service.prefixes.pace = Pace(patience_s=0.05, first_tokens=16, most_tokens=16)
    until = threading.Event()
    script = below.engine.script
    below.engine.script = held(until)
    with http_client(server) as client:
        asking = threading.Thread(target=lambda: client.post(CHAT, json=chat_body("a long one")), name="kvtier-asking")
        asking.start()
        wait_until(lambda: below.engine.submits)
        below.engine.script = script
        try:
            assert "prefix" in warm(client)[-1]
        finally:
            until.set()
            asking.join()
    assert below.computed == [*range(16, 200, 16), 200]


def test_a_cache_that_would_have_to_evict_asks_for_force(tmp_path: Path) -> None:
    with storing_engine(tmp_path, memory=128 * 4096, disk=None) as below:
        others = block_hashes(fields_of().digest(), range(100 * BLOCK_TOKENS), BLOCK_TOKENS)
        for part in (others[:50], others[50:]):
            below.client.set(part, [bytes(2 * BLOCK_TOKENS * 512)] * len(part))
        with running("openai", below.config()) as server, http_client(server) as client:
            refused = warm(client)[-1]["error"]
            assert refused["code"] == "would_evict"
            assert "--force" in refused["message"]
            assert not below.computed
            assert "prefix" in warm(client, force=True)[-1]
            huge = warm(client, name="huge", documents=[DOCUMENT * 3])[-1]["error"]
            assert huge["code"] == "cache_full"


def test_a_pin_without_room_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """The cache pins half of its 128 blocks; the document has 50."""
    with (
        storing_engine(tmp_path, memory=128 * 4096, disk=None) as below,
        running("openai", below.config()) as server,
        http_client(server) as client,
    ):
        assert "prefix" in warm(client, name="one", pin=True)[-1]
        assert "prefix" in warm(client, name="same", pin=True)[-1]
        computed = list(below.computed)
        other = " ".join(f"other{number}" for number in range(200))
        refused = warm(client, name="two", documents=[other], pin=True)[-1]["error"]
        assert refused["code"] == "cannot_pin"
        assert refused["message"].endswith("200KiB, but the cache may pin only 56KiB more: unpin another prefix first")
        assert below.computed == computed
        client.post(f"{PREFIXES}/same/unpin").raise_for_status()
        replaced = warm(client, name="one", documents=[other], pin=True)[-1]["prefix"]
        assert (replaced["is_pinned"], replaced["blocks"]) == (True, 50)
        client.post(f"{PREFIXES}/one/unpin").raise_for_status()
        refused = warm(client, name="two", documents=[DOCUMENT + other], pin=True)[-1]["error"]
        assert refused["message"].endswith("but the cache may pin only 256KiB more: give it more memory")


def test_a_tenant_of_the_cache_server_has_the_room_of_its_quota(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        '[ann]\ntoken = "a token of the tenant"\nmemory = "1MiB"\n[bob]\ntoken = "another token of 16"\n'
    )
    config = CacheServerConfig(
        memory_bytes=8 << 20, tcp=TcpAddress("127.0.0.1", 0), token=b"the owner's", tenants_file=tenants
    )
    server = CacheServer(config)
    try:
        ann, bob = (
            PrefixCache(CacheAddress(address=f"tcp://127.0.0.1:{server.tcp_port}", token=token)).room()
            for token in (b"a token of the tenant", b"another token of 16")
        )
    finally:
        server.close()
    assert ann == Room("memory", free_bytes=1 << 20, usable_bytes=1 << 20, pinnable_bytes=1 << 19)
    assert bob.free_bytes > 8 << 20


def test_an_engine_that_stores_nothing_is_told_of(
    server: Running, below: StoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.api.prefixes.filling._STORED_S", 0.05)
    below.stores = False
    with http_client(server) as client:
        error = warm(client)[-1]["error"]
        assert "0 of 50 blocks" in error["message"]
        assert client.get(PREFIXES).json()["prefixes"] == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "../x"}, "name must be at most"),
        ({"name": "<b>"}, "name must be at most"),
        ({"documents": [7]}, "documents must be a list of texts"),
        ({"documents": []}, "a prefix needs documents"),
        ({"ttl_s": -1}, "ttl_s must be"),
        ({"ttl_s": 1e300}, "ttl_s must be"),
        ({"model": "other"}, "is not served here"),
        ({"pinned": True}, "pinned is not supported"),
        ({"key": "nobody"}, "key must be the name of an API key"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(server: Running, fields: dict[str, Any], sentence: str) -> None:
    with http_client(server) as client:
        response = client.post(PREFIXES, json={"name": "handbook", "documents": [DOCUMENT], **fields})
    assert response.status_code in (400, 404)
    assert sentence in error_of(response)["message"]


def test_documents_without_a_full_block_are_refused(server: Running) -> None:
    with http_client(server) as client:
        assert "nothing can be cached" in warm(client, documents=["a b"])[-1]["error"]["message"]


def test_keys_see_their_own_and_only_an_admin_changes(below: StoringEngine) -> None:
    with running("openai", below.config(KEYS)) as server:
        with http_client(server) as nobody, http_client(server, key="key-ann") as ann:
            for client, status in ((nobody, 401), (ann, 403)):
                assert client.post(PREFIXES, json={"name": "a", "documents": [DOCUMENT]}).status_code == status
                for act in ("pin", "unpin", "drop", "rename", "add"):
                    assert client.post(f"{PREFIXES}/a/{act}", json={"name": "b"}).status_code == status
                assert client.get(f"{PREFIXES}/a").status_code == status
            assert nobody.get(PREFIXES).status_code == 401
        with http_client(server, key="key-root") as root:
            warm(root, name="shared")
            warm(root, name="of-bob", key="bob")
        names = {}
        for key in ("key-root", "key-ann", "key-bob", "key-eve"):
            with http_client(server, key=key) as client:
                names[key] = [one["name"] for one in client.get(PREFIXES).json()["prefixes"]]
                status = client.post(CHAT, json=chat_body("Who?", prefix="of-bob")).status_code
                assert status == (404 if key in ("key-ann", "key-eve") else 200)
                assert client.get(f"{PREFIXES}/of-bob").status_code == (200 if key == "key-root" else 403)
                dropped = client.post("/kvtier/v1/namespaces/nonsense/drop")
                assert dropped.status_code == (404 if key == "key-root" else 403)
    assert names == {
        "key-root": ["of-bob", "shared", None],
        "key-ann": ["shared"],
        "key-bob": ["of-bob"],
        "key-eve": ["of-bob", "shared"],  # it reads data about all keys
    }
