"""Tenants on one server, over TCP: what each sees, may do and keeps, whatever the others do."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, TierError, TierRefused
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.wire import messages as wire
from kvtier.wire.frames import encode_frame
from kvtier.wire.messages import LISTED_EVICTED, LISTED_MEMORY
from tests.support.actors import (
    LAYOUT,
    NAMESPACE,
    chain,
    handshaken,
    open_client,
    payloads,
    raw_socket,
    read_all,
    receive_message,
)
from tests.support.waiting import CALL_S, wait_until

SLOT_BYTES = 12 << 10
HASHES = chain(1, 12)

TWO = """
[alice]
token = "the secret of alice"

[bob]
token = "the secret of bob"
"""

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@contextlib.contextmanager
def serving(tmp_path: Path, text: str, *options: str, memory: str = "64MiB") -> Iterator[ServerProcess]:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with cache_server("--tenants", str(file), *options, tcp=True, memory=memory) as server:
        yield server


def tenant(server: ServerProcess, name: str, timeout_s: float = CALL_S) -> CacheClient:
    return open_client(server.tcp, f"the secret of {name}", timeout_s)


# --- what is not theirs ---------------------------------------------------------------------------------------------


def test_the_same_prompt_of_two_tenants_is_two(tmp_path: Path) -> None:
    with serving(tmp_path, TWO) as server, tenant(server, "alice") as alice, tenant(server, "bob") as bob:
        assert alice.set(HASHES, payloads(HASHES)) == 12

        assert read_all(bob, HASHES) == []
        assert not any(bob.contains(HASHES))
        assert bob.presence(NAMESPACE, HASHES) == [0] * 12
        assert bob.list_blocks() == []
        assert not any(known.blocks for known in bob.namespaces())
        with bob.match(HASHES) as lease:
            assert lease.num_blocks == 0
        assert bob.pin(HASHES) == 0
        assert bob.drop() == 0
        assert bob.drop(HASHES) == 0

        assert bob.set(HASHES, [bytes(len(block)) for block in payloads(HASHES)]) == 12
        assert read_all(alice, HASHES) == payloads(HASHES)
        assert alice.presence(NAMESPACE, HASHES) == [LISTED_MEMORY] * 12
        assert bob.drop() == 12
        assert read_all(alice, HASHES) == payloads(HASHES)


def test_nobody_learns_what_others_have_lost(tmp_path: Path) -> None:
    with (
        serving(tmp_path, TWO, memory="1MiB") as server,
        tenant(server, "alice") as alice,
        tenant(server, "bob") as bob,
    ):
        for seed in range(10, 30):
            alice.set(chain(seed, 12), payloads(chain(seed, 12)))

        lost = chain(10, 12)
        assert alice.presence(NAMESPACE, lost) == [LISTED_EVICTED] * 12
        assert bob.presence(NAMESPACE, lost) == [0] * 12


def test_a_name_that_another_tenant_sees_opens_nothing(tmp_path: Path) -> None:
    """The owner sees the server's names of tenants' namespaces, which are of no use to others."""
    with serving(tmp_path, TWO) as server, tenant(server, "alice") as alice:
        alice.set(HASHES, payloads(HASHES))
        with open_client(server.unix) as owner:
            kept = next(known.namespace for known in owner.namespaces() if known.tenant == "alice")
        with kvtier.connect(
            server.tcp, token="the secret of bob", layout=LAYOUT, namespace=kept, timeout_s=CALL_S
        ) as bob:
            assert read_all(bob, HASHES) == []


def test_a_client_of_one_tenant_does_not_become_anothers_by_its_id(tmp_path: Path) -> None:
    with serving(tmp_path, TWO) as server, tenant(server, "alice") as alice:
        alice.set(HASHES, payloads(HASHES))
        holder = alice._endpoint._holder
        with alice.match(HASHES) as lease, tenant(server, "bob") as bob:
            bob._endpoint._holder = holder
            bob._endpoint._pool.close_idle()
            bob.ping()
            bob._endpoint.close()  # says good-bye in the name of that id
            assert lease.num_blocks == 12
            assert alice.stats()["leases"] == 1


def test_stats_and_info_of_a_tenant_are_its_own(tmp_path: Path) -> None:
    with serving(tmp_path, TWO) as server, tenant(server, "alice") as alice, tenant(server, "bob") as bob:
        alice.set(HASHES, payloads(HASHES))

        assert alice.stats()["used_bytes"] == 12 * SLOT_BYTES
        assert bob.stats()["used_bytes"] == 0
        assert "folder" not in bob.info()
        assert [known.digest for known in alice.namespaces()] == [NAMESPACE.hex()]
        with open_client(server.unix) as owner:
            assert {known.tenant for known in owner.namespaces() if known.blocks} == {"alice"}
            tenants = owner.stats()["tenants"]
            assert isinstance(tenants, dict)
            assert tenants["alice"]["used_bytes"] == 12 * SLOT_BYTES


# --- what they may do -----------------------------------------------------------------------------------------------


def test_whoever_may_only_read_changes_nothing(tmp_path: Path) -> None:
    text = TWO.replace('of alice"', 'of alice"\nread_token = "the secret of carol"')
    with serving(tmp_path, text) as server, tenant(server, "alice") as alice, tenant(server, "carol") as carol:
        alice.set(HASHES[:6], payloads(HASHES[:6]))

        assert read_all(carol, HASHES) == payloads(HASHES[:6])
        assert carol.set(HASHES, payloads(HASHES)) == 0
        for order in (lambda: carol.pin(HASHES), carol.drop, carol.flush):
            with pytest.raises(TierRefused, match="of the tenant alice may only read"):
                order()
        assert read_all(alice, HASHES) == payloads(HASHES[:6])


def test_whoever_may_only_read_takes_no_name_and_leaves_no_note(tmp_path: Path) -> None:
    """A reader that comes first, with a wrong block size, keeps no writer out; one with the right size hits."""
    text = TWO.replace('of alice"', 'of alice"\nread_token = "the secret of carol"')
    with serving(tmp_path, text) as server, tenant(server, "carol") as carol, raw_socket(server.tcp) as reader:
        handshaken(reader, "the secret of carol")

        def ask(request: wire.Request) -> wire.Message:
            reader.sendall(encode_frame(1, wire.encode(request)))
            return receive_message(reader)

        assert isinstance(ask(wire.Open(NAMESPACE, "forged", 1, 1, '{"salt":"forged"}')), wire.Opened)
        assert read_all(carol, HASHES) == []
        with tenant(server, "alice") as alice:
            assert alice.set(HASHES, payloads(HASHES)) == len(HASHES)
            assert [found.name for found in alice.namespaces()] != ["forged"]
        assert read_all(carol, HASHES) == payloads(HASHES)
        assert isinstance(ask(wire.NoteRequest("id", "forged")), wire.Failure)
        assert ask(wire.NotedRequest("id")) == wire.Document("")


def test_an_admin_sees_and_drops_everybodys(tmp_path: Path) -> None:
    text = TWO + '[root]\ntoken = "the secret of root"\nadmin = true\n'
    with serving(tmp_path, text) as server, tenant(server, "alice") as alice, tenant(server, "root") as root:
        alice.set(HASHES, payloads(HASHES))
        (found,) = [known for known in root.namespaces() if known.blocks]
        assert found.tenant == "alice"
        with kvtier.connect(
            server.tcp, token="the secret of root", layout=LAYOUT, namespace=found.namespace, timeout_s=CALL_S
        ) as admin:
            assert read_all(admin, HASHES) == payloads(HASHES)
            assert admin.drop() == 12
        assert read_all(alice, HASHES) == []


def test_the_one_token_is_the_owners_beside_tenants(tmp_path: Path) -> None:
    with serving(tmp_path, TWO) as server, open_client(server.tcp, server.token) as owner:
        with tenant(server, "alice") as alice:
            alice.set(HASHES, payloads(HASHES))
        assert any(known.tenant == "alice" for known in owner.namespaces())


# --- rotation -------------------------------------------------------------------------------------------------------


def test_tokens_are_exchanged_without_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, TWO) as server, tenant(server, "alice") as alice, tenant(server, "bob") as bob:
        alice.set(HASHES, payloads(HASHES))
        file = tmp_path / "tenants.toml"
        both = TWO.replace('token = "the secret of alice"', 'tokens = ["a new one of alice", "the secret of alice"]')
        file.write_text(both)
        wait_until(lambda: _lets_in(server, "a new one of alice"))
        assert read_all(alice, HASHES) == payloads(HASHES)

        file.write_text(TWO.replace("the secret of alice", "a new one of alice"))
        wait_until(lambda: not _lets_in(server, "the secret of alice"))
        wait_until(lambda: read_all(alice, HASHES) == [])  # its connections have ended
        bob.ping()
        with open_client(server.tcp, "a new one of alice") as again:
            assert read_all(again, HASHES) == payloads(HASHES)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, TWO) as server, tenant(server, "alice") as alice:
        file = tmp_path / "tenants.toml"
        file.write_text("[alice")
        other = tmp_path / "more.toml"
        other.write_text(TWO + '[carol]\ntoken = "the secret of carol"\n')
        alice.ping()
        other.replace(file)  # as editors do
        wait_until(lambda: _lets_in(server, "the secret of carol"))
        alice.ping()


def _lets_in(server: ServerProcess, token: str) -> bool:
    with raw_socket(server.tcp) as sock:
        try:
            handshaken(sock, token)
        except TierRefused:
            return False
        return True


# --- certificates ---------------------------------------------------------------------------------------------------


def _make_certificates(folder: Path) -> None:
    """One who signs, the server's certificate, and one for alice and for mallory each; mallory's signs itself."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    openssl("req", "-x509", *key, "-keyout", "mallory.key", "-out", "mallory.pem", "-days", "2", "-subj", "/CN=alice")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "alice", "eve"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        more = ("-extfile", "names") if name == "server" else ()
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed, *more)


@needs_openssl
def test_a_certificate_stands_for_a_token(tmp_path: Path) -> None:
    _make_certificates(tmp_path)
    tls = ("--tls-cert", str(tmp_path / "server.pem"), "--tls-key", str(tmp_path / "server.key"))
    text = '[alice]\ncertificate = "alice"\n[bob]\ntoken = "the secret of bob"\n'

    def connected(server: ServerProcess, name: str | None, token: str | None = None) -> CacheClient:
        own = {"certificate": tmp_path / f"{name}.pem", "key": tmp_path / f"{name}.key"} if name else {}
        return kvtier.connect(
            server.tcp,
            layout=LAYOUT,
            namespace=NAMESPACE,
            token=token,
            ca_file=tmp_path / "ca.pem",
            timeout_s=CALL_S,
            **own,
        )

    with serving(tmp_path, text, *tls, "--tls-client-ca", str(tmp_path / "ca.pem")) as server:
        with connected(server, "alice") as alice, connected(server, None, "the secret of bob") as bob:
            alice.set(HASHES, payloads(HASHES))
            assert read_all(alice, HASHES) == payloads(HASHES)
            assert read_all(bob, HASHES) == []
        for name in ("eve", None):  # certified, but nobody's; and not certified at all
            with pytest.raises(TierRefused, match="wants a token"):
                connected(server, name)
        with pytest.raises(TierError):
            connected(server, "mallory")


def test_a_certificate_without_its_key_is_told() -> None:
    with pytest.raises(ConfigError, match="needs its key"):
        kvtier.connect("tcp://127.0.0.1:1", certificate="a.pem", ca_file="ca.pem")


# --- quotas ---------------------------------------------------------------------------------------------------------


def quotas(unit: int, **shares: int) -> str:
    """Shares in blocks."""
    return "\n".join(
        f'[{name}]\ntoken = "the secret of {name}"\nmemory = {share * unit}\nleased = {share * unit}'
        for name, share in shares.items()
    )


def test_what_is_within_a_tenants_share_of_memory_stays(tmp_path: Path) -> None:
    with serving(tmp_path, quotas(SLOT_BYTES, alice=24, bob=24), memory="1MiB") as server:
        with tenant(server, "alice") as alice, tenant(server, "bob") as bob:
            kept = [chain(seed, 12) for seed in (1, 2)]
            for hashes in kept:
                assert alice.set(hashes, payloads(hashes)) == 12
            for seed in range(100, 140):
                bob.set(chain(seed, 12), payloads(chain(seed, 12)))
                with open_client(server.unix) as owner:
                    owner.set(chain(seed, 12), payloads(chain(seed, 12)))

            for hashes in kept:
                assert read_all(alice, hashes) == payloads(hashes)
            assert bob.stats()["used_bytes"] >= 24 * SLOT_BYTES


def test_room_that_nobody_claims_is_anyones(tmp_path: Path) -> None:
    with serving(tmp_path, quotas(SLOT_BYTES, alice=24, bob=24), memory="1MiB") as server:
        with tenant(server, "bob") as bob:
            for seed in range(100, 107):
                assert bob.set(chain(seed, 12), payloads(chain(seed, 12))) == 12
            assert read_all(bob, chain(100, 12)) == payloads(chain(100, 12))
            with tenant(server, "alice") as alice:
                for seed in (1, 2):
                    assert alice.set(chain(seed, 12), payloads(chain(seed, 12))) == 12
                assert read_all(alice, chain(1, 12)) == payloads(chain(1, 12))


def test_a_tenant_that_holds_all_it_may_keeps_nobody_else_from_theirs(tmp_path: Path) -> None:
    with serving(tmp_path, quotas(SLOT_BYTES, alice=24, bob=24), memory="1MiB") as server:
        with tenant(server, "alice") as alice, tenant(server, "bob") as bob, contextlib.ExitStack() as leases:
            for seed in range(100, 107):
                bob.set(chain(seed, 12), payloads(chain(seed, 12)))
            held = [leases.enter_context(bob.match(chain(seed, 12))) for seed in range(100, 107)]
            assert sum(lease.num_blocks for lease in held) <= 24
            for seed in (1, 2):
                assert alice.set(chain(seed, 12), payloads(chain(seed, 12))) == 12


def test_a_tenants_worker_gets_what_its_scheduler_has_leased(tmp_path: Path) -> None:
    """vLLM's scheduler leases what its workers, clients of their own over TCP, then load."""
    with serving(tmp_path, quotas(SLOT_BYTES, alice=24, bob=24), memory="1MiB") as server:
        with tenant(server, "alice") as scheduler, tenant(server, "alice") as worker:
            prompts = [chain(1, 12), chain(2, 12)]
            for hashes in prompts:
                assert scheduler.set(hashes, payloads(hashes)) == 12
            with contextlib.ExitStack() as leases:
                held = [leases.enter_context(scheduler.match_lazily(hashes)) for hashes in prompts]
                assert sum(lease.num_blocks for lease in held) == 24, "all that the tenant may hold"

                for hashes in prompts:
                    assert read_all(worker, hashes) == payloads(hashes)
                with contextlib.ExitStack() as loads:
                    loading = [loads.enter_context(worker.match(hashes)) for hashes in prompts]
                    assert [lease.num_blocks for lease in loading] == [12, 12]


def test_what_is_within_a_tenants_share_of_the_disk_stays_over_restarts(tmp_path: Path) -> None:
    text = "\n".join(f'[{name}]\ntoken = "the secret of {name}"\ndisk = "1MiB"' for name in ("alice", "bob"))
    (tmp_path / "tenants.toml").write_text(text)
    disk = ("--tenants", str(tmp_path / "tenants.toml"), "--folder", str(tmp_path / "cache"), "--disk", "4MiB")
    with cache_server(*disk, tcp=True, memory="512KiB") as server:
        with tenant(server, "alice") as alice, tenant(server, "bob") as bob:
            alice.set(HASHES, payloads(HASHES))
            alice.flush()
            for seed in range(100, 160):
                bob.set(chain(seed, 12), payloads(chain(seed, 12)))
                bob.flush()
            assert bob.presence(NAMESPACE, chain(100, 12)) == [LISTED_EVICTED] * 12
            assert read_all(alice, HASHES) == payloads(HASHES)
    with cache_server(*disk, tcp=True, memory="512KiB") as server:
        with tenant(server, "alice") as alice, tenant(server, "bob") as bob:
            assert read_all(alice, HASHES) == payloads(HASHES)
            for seed in range(200, 260):
                bob.set(chain(seed, 12), payloads(chain(seed, 12)))
                bob.flush()
            assert read_all(alice, HASHES) == payloads(HASHES)
            (known,) = alice.namespaces()
            assert known.disk_blocks == 12
            assert {known.tenant for known in bob.namespaces()} == {"bob"}


def test_connections_of_a_tenant_have_a_limit_of_their_own(tmp_path: Path) -> None:
    text = TWO.replace('of alice"', 'of alice"\nconnections = 2')
    with serving(tmp_path, text) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            handshaken(stack.enter_context(raw_socket(server.tcp)), "the secret of alice")
        with raw_socket(server.tcp) as third, pytest.raises(TierRefused, match="2 connections of the tenant alice"):
            handshaken(third, "the secret of alice")
        handshaken(stack.enter_context(raw_socket(server.tcp)), "the secret of bob")
