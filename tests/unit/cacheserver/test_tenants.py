"""The file of tenants, what it opens, and how fast each may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.bandwidth import Bandwidth
from kvtier.cacheserver.tenants import PROCESS_OF_THIS_HOST, Tenants, split_tagged
from kvtier.errors import ConfigError

TWO = """
[alice]
token = "the secret of alice"
read_token = "a smaller one of alice"

[bob]
token = "the secret of bob"
"""


def tenants_of(file: Path) -> Tenants:
    return Tenants(memory_bytes=64 << 20, file_bytes=None, file=file, token=b"of the owner")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tenants.toml").write_text(TWO)
    return tmp_path / "tenants.toml"


def test_a_token_tells_who_it_is_and_what_that_one_may_do(file: Path) -> None:
    tenants = tenants_of(file)

    found = {token: tenants.holder_of(token) for token in tenants.tokens()}

    assert {token: (one[0].name, one[1].may_write) for token, one in found.items() if one is not None} == {
        b"of the owner": ("", True),
        b"the secret of alice": ("alice", True),
        b"a smaller one of alice": ("alice", False),
        b"the secret of bob": ("bob", True),
    }
    assert tenants.holder_of(b"no such token") is None


def test_what_was_let_in_stays_until_its_token_has_gone(file: Path) -> None:
    tenants = tenants_of(file)
    let_in = [one for token in tenants.tokens() if (one := tenants.holder_of(token)) is not None]
    let_in.append((tenants.owner, PROCESS_OF_THIS_HOST))
    assert all(tenants.still_knows(*one) for one in let_in)

    file.write_text(TWO.replace("the secret of alice", "another of alice"))
    assert tenants.reload()

    gone = [one for one in let_in if not tenants.still_knows(*one)]
    assert [credential.token for _, credential in gone] == [b"the secret of alice"]
    assert not tenants.reload()  # nothing has changed since


def test_a_tenant_that_comes_back_has_what_it_had(file: Path) -> None:
    tenants = tenants_of(file)
    found = tenants.holder_of(b"the secret of bob")
    assert found is not None
    bob = found[0]
    bob.memory.used = 5

    file.write_text(TWO.partition("[bob]")[0])
    assert tenants.reload()
    assert tenants.holder_of(b"the secret of bob") is None
    assert tenants.owner_of(bob.tagged("a model")) is bob

    file.write_text(TWO + "# again\n")
    assert tenants.reload()
    assert tenants.holder_of(b"the secret of bob") == (bob, found[1])


def test_namespaces_of_tenants_are_their_own_and_the_owners_as_they_are(file: Path) -> None:
    tenants = tenants_of(file)
    namespace = Namespace(bytes(32))
    own = {tenant.name: tenant.own(namespace) for tenant in tenants}

    assert own[""] == namespace
    assert len(set(own.values())) == 3
    tags = {tenant.name: tenant.tagged("a model") for tenant in tenants}
    assert {name: split_tagged(tag) for name, tag in tags.items()} == {name: (name, "a model") for name in own}


def test_bytes_are_moved_no_faster_than_allowed() -> None:
    now = 100.0
    bandwidth = Bandwidth(1000, clock=lambda: now)

    waits = [bandwidth.spend(500), bandwidth.spend(500)]
    now += waits[-1]

    assert waits == [0.25, 0.75]  # a quarter of a second may be made up for
    assert bandwidth.spend(100) == pytest.approx(0.1)
    assert Bandwidth(None).spend(1 << 40) == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must have from 1 to 256 tenants, not 0"),
        ("[alice]\n", "tenant 'alice': give the tenant a token, tokens or a certificate"),
        ('[alice]\ntoken = "short"\n', "a token is too short: use 8 characters or more"),
        ('["a b"]\ntoken = "long enough"\n', "a name has from 1 to 32 of the characters"),
        (TWO + 'memory = "1TiB"\n', "have quotas of 1TiB of memory, but the server has 64MiB"),
        (TWO + 'disk = "1GiB"\n', "have quotas of 1GiB of disk, but the server has none"),
        (TWO + "king = true\n", "contains unknown field `king`"),
        (TWO + 'memory = "much"\n', "tenant 'bob': memory: 'much' is not a size"),
        ('[a]\ntoken = "long enough"\n[b]\ntoken = "long enough"\n', "occurs twice in"),
        ("[a\n", "is not a valid tenants' file"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "tenants.toml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        tenants_of(tmp_path / "tenants.toml")
