"""Why a request missed: every reason, from real servers, by `explain`, by notes and by `kvtier explain`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvtier
from kvtier import KvLayout, NamespaceFields
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.cli.explain import ModelOptions
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, TierError
from kvtier.testing.servers import ServerProcess, cache_server, start_cache_server
from kvtier.tiers.explaining import explain, explain_request
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.transport.address import UnixAddress
from kvtier.wire import messages as wire
from kvtier.wire.frames import encode_frame
from tests.support.actors import handshaken, raw_socket, receive_message
from tests.support.faulty_files import FaultyFiles
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=16)
"""10,240 bytes a block in slots of 12 KiB."""

TOKENS = list(range(16 * 5 + 3))
CONFIG = {"rope": {"theta": 10_000.0, "kind": "default"}, "windows": [None, None]}


def fields(**changes: object) -> NamespaceFields:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype=str(changes.pop("dtype", "float16")), block_tokens=16)
    return NamespaceFields(**({"layout": layout, "weights": "w", "model_config": CONFIG} | changes))  # type: ignore[arg-type]


def client_of(server: ServerProcess, namespace: NamespaceFields | None = None, name: str = "model") -> CacheClient:
    namespace = fields() if namespace is None else namespace
    return kvtier.connect(server.unix, layout=namespace.layout, namespace=namespace, name=name, timeout_s=CALL_S)


def store(client: CacheClient, tokens: Sequence[int], num_blocks: int | None = None) -> None:
    hashes = client.hashes(tokens)[:num_blocks]
    assert client.set(hashes, [bytes(client.layout.block_bytes)] * len(hashes)) == len(hashes)


def flood(client: CacheClient, num_blocks: int) -> None:
    """Blocks of other prompts, enough to push others out."""
    for seed in range(num_blocks):
        store(client, [1_000_000 + seed] * 16)


def noted(request_id: str = "r1", **changes: object) -> Explanation:
    values: dict[str, object] = {
        "request_id": request_id,
        "model": "model",
        "namespace": fields().digest().hex(),
        "prompt_tokens": len(TOKENS),
        "block_tokens": 16,
        "cached_tokens": {"device": 0, "server": 0},
        "ended_at_tokens": 0,
        "reason": MatchEnd.NEVER_STORED,
        "tier": "server",
        "first_tokens": tuple(TOKENS[:16]),
    }
    return Explanation(**(values | changes))  # type: ignore[arg-type]


@contextlib.contextmanager
def served(*options: str, memory: str = "64MiB") -> Iterator[tuple[ServerProcess, CacheClient]]:
    with cache_server(*options, memory=memory) as server, client_of(server) as client:
        yield server, client


# --- a prompt against a running server -----------------------------------------------------------------------------


def test_a_prompt_that_nobody_stored_was_never_stored() -> None:
    with served() as (_, client):
        found = explain(client, fields(), TOKENS, model="model")

    assert (found.reason, found.ended_at_tokens, found.prompt_tokens) == (MatchEnd.NEVER_STORED, 0, 83)
    assert found.cached_tokens == {"memory": 0, "disk": 0}
    assert found.first_tokens == tuple(range(16))
    assert found.namespace == fields().digest().hex()


def test_a_prompt_that_is_cached_says_so_and_one_that_is_longer_where_it_ends() -> None:
    with served() as (_, client):
        store(client, TOKENS)
        whole = explain(client, fields(), TOKENS)
        longer = explain(client, fields(), [*TOKENS, *range(100)])

    assert (whole.reason, whole.ended_at_tokens, whole.cached_tokens) == (MatchEnd.ALL, 80, {"memory": 80, "disk": 0})
    assert (longer.reason, longer.ended_at_tokens) == (MatchEnd.NEVER_STORED, 80)


def test_a_prompt_that_was_pushed_out_was_evicted() -> None:
    with served("--max-leased", "96KiB", memory="96KiB") as (_, client):
        store(client, TOKENS)
        flood(client, 5)
        found = explain(client, fields(), TOKENS)
        with client.match(client.hashes(TOKENS)) as lease:
            assert lease.ended is MatchEnd.EVICTED
            assert lease.num_blocks * 16 == found.ended_at_tokens

    assert found.reason is MatchEnd.EVICTED
    assert "has been evicted" in found.sentence()


def test_what_a_user_dropped_was_not_evicted() -> None:
    with served() as (_, client):
        store(client, TOKENS)
        client.drop()
        assert explain(client, fields(), TOKENS).reason is MatchEnd.NEVER_STORED


def test_a_prompt_that_is_being_written_is_pending() -> None:
    with served() as (_, client):
        store(client, TOKENS, 2)
        with client.reserve(client.hashes(TOKENS)):
            found = explain(client, fields(), TOKENS)

    assert (found.reason, found.ended_at_tokens) == (MatchEnd.PENDING, 32)


def test_explaining_uses_nothing_and_opens_nothing() -> None:
    with served() as (server, client), kvtier.connect(server.unix, timeout_s=CALL_S) as bare:
        store(client, TOKENS)
        before = client.stats()
        explain(bare, fields(salt="other"), TOKENS)
        after = client.stats()

    for name in ("hit_blocks", "missed_blocks", "leases", "held_bytes", "namespaces"):
        assert after[name] == before[name]


def test_a_match_that_ends_at_the_clients_limit_says_so() -> None:
    with served("--max-leased", "24KiB") as (_, client):
        store(client, TOKENS[:32])
        store(client, TOKENS[32:64])
        hashes = [*client.hashes(TOKENS[:32]), *client.hashes(TOKENS[32:64])]
        with client.match(hashes) as lease:
            assert (lease.num_blocks, lease.ended) == (2, MatchEnd.LIMIT)


# --- with a disk ---------------------------------------------------------------------------------------------------


def test_what_is_on_disk_counts_as_disk_also_after_a_restart(tmp_path: Path) -> None:
    options = ("--folder", str(tmp_path / "data"), "--disk", "1MiB")
    with served(*options) as (_, client):
        store(client, TOKENS)
        client.flush()
        assert explain(client, fields(), TOKENS).cached_tokens == {"memory": 80, "disk": 0}
    with cache_server(*options) as server, kvtier.connect(server.unix, timeout_s=CALL_S) as bare:
        found = explain(bare, fields(), TOKENS)
        assert (found.reason, found.cached_tokens) == (MatchEnd.ALL, {"memory": 0, "disk": 80})
        other = explain(bare, fields(salt="other"), TOKENS)

    assert other.reason is MatchEnd.OTHER_NAMESPACE
    assert "whose fields are unknown" in other.detail


def test_with_a_disk_only_what_is_in_neither_place_was_evicted(tmp_path: Path) -> None:
    options = ("--folder", str(tmp_path), "--disk", "1MiB", "--max-leased", "96KiB")
    with served(*options, memory="96KiB") as (_, client):
        store(client, TOKENS)
        client.flush()
        for seed in range(20):
            store(client, [2_000_000 + seed] * 16)
            client.flush()
        on_disk = explain(client, fields(), TOKENS)
        assert on_disk.reason is MatchEnd.ALL
        assert on_disk.cached_tokens["disk"] > 0

        for seed in range(120):
            store(client, [3_000_000 + seed] * 16)
            client.flush()
        assert explain(client, fields(), TOKENS).reason is MatchEnd.EVICTED
        assert client.match(client.hashes(TOKENS)).ended is MatchEnd.EVICTED
        store(client, TOKENS)
        assert explain(client, fields(), TOKENS).reason is MatchEnd.ALL
        client.drop(client.hashes(TOKENS))
        assert explain(client, fields(), TOKENS).reason is MatchEnd.NEVER_STORED


def test_a_disk_that_is_down_may_have_had_it(tmp_path: Path) -> None:
    files = FaultyFiles()
    config = CacheServerConfig(
        memory_bytes=1 << 20,
        unix=UnixAddress(str(tmp_path / "socket")),
        folder=tmp_path / "data",
        file_bytes=1 << 20,
    )
    with (
        contextlib.closing(CacheServer(config, files=files)),
        kvtier.connect(f"unix:{tmp_path / 'socket'}", layout=LAYOUT, namespace=fields()) as client,
    ):
        assert client.match(client.hashes(TOKENS)).ended is MatchEnd.NEVER_STORED
        (tmp_path / "data").rename(tmp_path / "away")
        wait_until(lambda: client.stats()["disk_up"] == 0.0)
        found = explain(client, fields(), TOKENS)
        ended = client.match(client.hashes(TOKENS)).ended
        (tmp_path / "away").rename(tmp_path / "data")

    assert (found.reason, ended) == (MatchEnd.TIER_DOWN, MatchEnd.TIER_DOWN)


def test_a_block_that_its_disk_gives_back_wrong_is_lost(tmp_path: Path) -> None:
    options = ("--folder", str(tmp_path), "--disk", "1MiB")
    with served(*options) as (_, client):
        store(client, TOKENS)
        client.flush()
    payloads = tmp_path / "blocks.kvtier"
    payloads.write_bytes(b"\1" * payloads.stat().st_size)
    with served(*options) as (_, client), client.match(client.hashes(TOKENS)) as lease:
        lease.wait()
        assert (lease.num_blocks, lease.ended) == (0, MatchEnd.LOST)
        assert explain(client, fields(), TOKENS).reason is MatchEnd.NEVER_STORED


# --- other namespaces ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights": "others"}, "weights"),
        ({"dtype": "bfloat16"}, "compute_dtype, kv_dtype"),
        ({"compute_dtype": "float32"}, "compute_dtype"),
        ({"quantization": "fp8"}, "quantization"),
        ({"model_config": CONFIG | {"rope": {"theta": 1e6, "kind": "default"}}}, "model_config.rope.theta"),
        ({"lora": "adapter"}, "lora"),
        ({"salt": "tenant"}, "salt"),
        ({"salt": "tenant", "lora": "adapter"}, "lora, salt"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_prompt_that_another_namespace_holds_names_the_fields_that_differ(
    change: dict[str, object], named: str
) -> None:
    with served() as (server, client), client_of(server, fields(**change), name="theirs") as other:
        store(other, TOKENS)
        found = explain(client, fields(), TOKENS)

    assert found.reason is MatchEnd.OTHER_NAMESPACE
    assert found.detail.startswith("80 of these tokens are cached as theirs (")
    assert found.detail.endswith(f", which differs in {named}")
    assert (found.ended_at_tokens, found.cached_tokens) == (0, {"memory": 0, "disk": 0})


def test_blocks_of_another_size_are_found_too() -> None:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=32)
    with served() as (server, client), client_of(server, fields(layout=layout)) as other:
        store(other, TOKENS)
        found = explain(client, fields(), TOKENS)

    assert (found.reason, found.detail.rpartition(" ")[2]) == (MatchEnd.OTHER_NAMESPACE, "block_tokens")
    assert found.detail.startswith("64 of these tokens")


def test_the_nearest_of_several_namespaces_is_named() -> None:
    with (
        served() as (server, client),
        client_of(server, fields(weights="x", salt="a", lora="b"), name="far") as far,
        client_of(server, fields(salt="a"), name="near") as near,
        client_of(server, fields(lora="a"), name="short") as short,
    ):
        for other, num_blocks in ((far, 4), (near, 4), (short, 3)):
            store(other, TOKENS, num_blocks)
        store(client, TOKENS, 1)
        found = explain(client, fields(), TOKENS)

    assert (found.reason, found.ended_at_tokens) == (MatchEnd.OTHER_NAMESPACE, 16)
    assert "near" in found.detail


def test_an_evicted_block_stays_evicted_whoever_else_has_it() -> None:
    with served(memory="192KiB") as (server, client), client_of(server, fields(salt="a")) as other:
        store(client, TOKENS)
        flood(client, 16)
        store(other, TOKENS)
        assert explain(client, fields(), TOKENS).reason is MatchEnd.EVICTED


def test_a_namespace_known_by_its_digest_alone_is_found_without_names() -> None:
    other = fields(salt="a")
    with (
        served() as (server, client),
        kvtier.connect(server.unix, layout=LAYOUT, namespace=other.digest(), timeout_s=CALL_S) as digest,
    ):
        store(digest, TOKENS)
        found = explain(client, fields(), TOKENS)

    assert found.reason is MatchEnd.OTHER_NAMESPACE
    assert "cached as unnamed" in found.detail
    assert found.detail.endswith("whose fields are unknown")


def test_info_shows_what_a_namespace_covers_and_no_salt() -> None:
    with served() as (server, client), client_of(server, fields(salt="a secret"), name="salted"):
        info = client.info()
        stats = client.stats()

    shown = {each["name"]: each["fields"] for each in info["namespaces"]}  # type: ignore[attr-defined]
    assert shown == {"model": fields().document(), "salted": fields(salt="a secret").document()}
    assert "a secret" not in json.dumps(info)
    assert "rope" not in json.dumps(stats)


def test_what_a_namespace_covers_is_told_again_after_a_restart(tmp_path: Path) -> None:
    server = start_cache_server(tmp_path, memory="64MiB", tcp=False)
    try:
        with client_of(server) as client:
            server.kill()
            assert server.process.stdout is not None
            server.process.stdout.close()
            server = start_cache_server(tmp_path, memory="64MiB", tcp=False)
            wait_until(lambda: client.match(client.hashes(TOKENS)).ended is MatchEnd.NEVER_STORED)
            assert [each.fields for each in client.namespaces()] == [fields().document()]
    finally:
        server.stop()
        assert server.process.stdout is not None
        server.process.stdout.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [("not JSON", "must be a JSON object"), ("[]", "must be a JSON object"), ('{"a":' * 20 + "1" + "}" * 20, "deep")],
    ids=["text", "list", "deep"],
)
def test_fields_that_are_no_document_are_refused_and_the_connection_goes_on(text: str, why: str) -> None:
    with cache_server() as server, raw_socket(server.unix) as sock:
        handshaken(sock, None)
        sock.sendall(encode_frame(1, wire.encode(wire.Open(bytes(32), "raw", 4096, 16, text))))
        failure = receive_message(sock)
        assert isinstance(failure, wire.Failure)
        assert failure.kind == "refused"
        assert why in failure.sentence
        sock.sendall(encode_frame(2, wire.encode(wire.Ping())))
        assert isinstance(receive_message(sock), wire.Done)


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([10, bytes(32), "raw", 4096, 16, '"' * (65 << 10)], "fields have at most 65536 characters"),
        ([30, "r" * 257, "{}"], "a request id has from 1 to 256 characters"),
        ([30, "r1", "t" * (65 << 10)], "a note has at most 65536 characters"),
        ([31, ""], "a request id has from 1 to 256 characters"),
    ],
    ids=["fields", "id", "note", "noted"],
)
def test_hostile_sizes_end_the_connection_with_a_sentence(items: list[object], why: str) -> None:
    body = wire._encoder.encode(items)  # type: ignore[arg-type]
    with served() as (server, client), raw_socket(server.unix) as sock:
        handshaken(sock, None)
        sock.sendall(encode_frame(1, body))
        failure = receive_message(sock)
        assert isinstance(failure, wire.Failure)
        assert why in failure.sentence
        assert client.noted("r1") is None


def test_fields_too_long_to_tell_do_not_keep_a_client_out() -> None:
    huge = fields(model_config={"text": "x" * (65 << 10)})
    with cache_server() as server, client_of(server, huge) as client:
        store(client, TOKENS)
        assert [each.fields for each in client.namespaces()] == [None]


# --- notes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_what_was_noted_of_a_request_is_read_back(transport: str) -> None:
    note = noted(reason=MatchEnd.SLOWER, ended_at_tokens=16, cached_tokens={"device": 16}, detail="2 ms against 1 ms")
    with cache_server(tcp=True) as server:
        token = server.token if transport == "tcp" else None
        with kvtier.connect(getattr(server, transport), token=token, timeout_s=CALL_S) as client:
            client.note(note)
            client.flush()
            assert explain_request(client, "r1") == note
            assert explain_request(client, "r2") is None


@pytest.mark.parametrize("reason", [reason for reason in MatchEnd if reason is not MatchEnd.NEVER_STORED])
def test_every_other_reason_is_told_as_it_was_noted(reason: MatchEnd) -> None:
    with served() as (_, client):
        client.note(noted(reason=reason))
        client.flush()
        assert explain_request(client, "r1") == noted(reason=reason)


def test_a_first_block_that_was_never_stored_is_looked_for_in_other_namespaces() -> None:
    with served() as (server, client), client_of(server, fields(salt="tenant"), name="theirs") as other:
        store(other, TOKENS)
        client.note(noted("at the start"))
        client.note(noted("later", ended_at_tokens=16, cached_tokens={"server": 16}))
        client.flush()
        first, later = explain_request(client, "at the start"), explain_request(client, "later")

    assert first is not None
    assert (first.reason, first.detail.rpartition(", ")[2]) == (MatchEnd.OTHER_NAMESPACE, "which differs in salt")
    assert later is not None
    assert later.reason is MatchEnd.NEVER_STORED


def test_only_the_last_notes_are_kept() -> None:
    with served() as (_, client):
        for number in range(4200):
            client.note(noted(f"r{number}"))
            if number % 100 == 99:
                client.flush()
        client.flush()
        assert client.noted("r0") is None
        assert client.noted("r103") is None
        assert client.noted("r104") is not None
        assert client.noted("r4199") is not None


def test_a_note_too_large_is_not_kept_and_not_an_error() -> None:
    with served() as (_, client):
        client.note(noted("long", detail="d" * (65 << 10)))
        client.note(noted("i" * 257))
        client.flush()
        assert client.noted("long") is None
        assert client.metrics.value(client.metrics.failures, kind="refused") == 2
        with pytest.raises(ConfigError, match="from 1 to 256 characters"):
            client.noted("i" * 257)


def test_a_note_that_is_no_explanation_is_said_to_be_none() -> None:
    class Garbage:
        request_id = "r1"

        def to_json(self) -> str:
            return "{}"

    with served() as (_, client):
        client.note(Garbage())
        client.flush()
        with pytest.raises(ConfigError, match="this is not an explanation"):
            explain_request(client, "r1")


def test_noting_never_raises_for_a_server_that_died_and_notes_do_not_survive_it(tmp_path: Path) -> None:
    server = start_cache_server(tmp_path, memory="64MiB", tcp=False)
    try:
        with client_of(server) as client:
            client.note(noted("before"))
            client.flush()
            server.kill()
            assert server.process.stdout is not None
            server.process.stdout.close()
            for number in range(2000):
                client.note(noted(f"r{number}"))
            with pytest.raises(TierError):
                client.noted("before")
            server = start_cache_server(tmp_path, memory="64MiB", tcp=False)
            wait_until(lambda: client.is_up)
            assert client.noted("before") is None
            client.note(noted("after"))
            client.flush()
            assert client.noted("after") is not None
    finally:
        server.stop()
        assert server.process.stdout is not None
        server.process.stdout.close()


# --- servers that die ----------------------------------------------------------------------------------------------


def test_a_server_that_died_is_told_from_one_that_has_nothing() -> None:
    with (
        cache_server(tcp=True) as server,
        kvtier.connect(
            server.tcp, token=server.token, layout=LAYOUT, namespace=fields(salt="a"), timeout_s=CALL_S
        ) as client,
    ):
        hashes = client.hashes(range(800))
        client.set(hashes, [bytes(LAYOUT.block_bytes)] * len(hashes))
        assert explain(client, fields(salt="a"), range(800)).reason is MatchEnd.ALL

        server.kill()
        with client.match(hashes) as lease:
            assert lease.ended is MatchEnd.TIER_DOWN
        with pytest.raises(TierError):
            explain(client, fields(), range(800))


# --- the command ---------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier", "explain", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and weights of one tensor: enough to know whose blocks they are."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_model(folder)
    return folder


def write_model(folder: Path, weights: bytes = b"\0" * 64, **changes: object) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    header = json.dumps({"w": {"dtype": "F16", "shape": [32], "data_offsets": [0, 64]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)


def test_the_command_explains_a_request_by_its_id() -> None:
    with served() as (server, client), client_of(server, fields(salt="tenant"), name="theirs") as other:
        store(other, TOKENS)
        client.note(noted())
        client.flush()
        asked = run("--server", server.unix, "r1")
        for_machines = run("--server", server.unix, "r1", "--json")
        unknown = run("--server", server.unix, "r2")

    assert asked.returncode == 0
    lines = asked.stdout.splitlines()
    assert lines[0].split() == ["request", "r1"]
    assert "because    other namespace (server)" in lines
    assert "which differs in salt" in lines[-1]
    assert Explanation.from_json(for_machines.stdout).reason is MatchEnd.OTHER_NAMESPACE
    assert unknown.returncode == 1
    assert unknown.stderr == (
        f"Error: {server.unix} has no note of request r2: it is too old, or its engine does not report there\n"
    )


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        ({"weights": b"\1" * 64}, (), "weights"),
        ({"torch_dtype": "bfloat16"}, (), "compute_dtype, kv_dtype"),
        ({"torch_dtype": "bfloat16"}, ("--dtype", "float16"), ""),
        ({"rope_theta": 5e5}, (), "model_config.rope.theta"),
        ({}, ("--salt", "tenant"), "salt"),
        ({}, ("--lora", "adapter"), "lora"),
        ({}, ("--quantization", "fp8"), "quantization"),
        ({}, ("--block-size", "8"), "block_tokens"),
        ({"max_position_embeddings": 1024}, (), ""),
    ],
    ids=["weights", "config dtype", "dtype", "rope", "salt", "lora", "quantization", "block size", "nothing"],
)
def test_the_command_finds_in_what_a_prompt_is_another_models(
    model: Path, tmp_path: Path, change: dict[str, object], options: tuple[str, ...], named: str
) -> None:
    stored = ModelOptions(
        folder=model,
        load_format="auto",
        dtype="auto",
        quantization=None,
        device="auto",
        block_size=16,
        salt="",
        lora="",
    ).fields()
    folder = tmp_path / "mine"
    folder.mkdir()
    write_model(folder, **change)  # type: ignore[arg-type]
    text = ",".join(map(str, TOKENS))
    with cache_server() as server, client_of(server, stored) as client:
        store(client, TOKENS)
        asked = run("--server", server.unix, "--model", str(folder), "--tokens", text, *options, "--json")

    assert asked.returncode == 0, asked.stderr
    found = Explanation.from_json(asked.stdout)
    assert found.model == "mine"
    if named:
        assert found.detail.endswith(f"which differs in {named}")
    else:
        assert (found.reason, found.cached_tokens) == (MatchEnd.ALL, {"memory": 80, "disk": 0})


def test_the_command_over_tcp_needs_the_token(model: Path) -> None:
    with cache_server(tcp=True) as server:
        given = ("--server", server.tcp, "--model", str(model), "--tokens", "1,2")
        refused = run(*given)
        asked = run(*given, "--token-file", str(server.folder / "token"))

    assert (refused.returncode, asked.returncode) == (1, 0)
    assert "token" in refused.stderr
    assert "no full block was left" in asked.stdout


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((), 2, "Give a request id, or --model"),
        (("r1", "--model", "m", "--tokens", "1"), 2, "Give a request id, or --model"),
        (("--model", "m"), 2, "Give a request id, or --model"),
        (("--model", "m", "--tokens", "1", "--prompt", "x"), 2, "Give a request id, or --model"),
        (("r1", "--tokens", "1"), 2, "Give a request id, or --model"),
        (("--model", "/nowhere", "--tokens", "1"), 1, "there is no model folder /nowhere"),
        (("--model", "/nowhere", "--tokens", "one"), 1, "token ids are whole numbers"),
        (("r1",), 1, "no cache server answers on unix:/nowhere"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    ended = run("--server", "unix:/nowhere", *arguments)

    assert ended.returncode == code
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "no *.safetensors files"),
    ],
)
def test_a_folder_that_is_no_model_is_said_so(tmp_path: Path, damage: str, sentence: str) -> None:
    write_model(tmp_path)
    (tmp_path / damage).unlink()
    ended = run("--server", "unix:/nowhere", "--model", str(tmp_path), "--tokens", "1")

    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert sentence in ended.stderr
