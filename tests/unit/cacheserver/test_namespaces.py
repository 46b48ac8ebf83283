"""Very many namespaces: a bound for each tenant, and nobody waits until all were looked at."""

from __future__ import annotations

import pytest

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver import namespaces as namespaces_module
from kvtier.cacheserver.namespaces import SWEPT_AT_ONCE, MemorySpace, Namespaces
from kvtier.cacheserver.tenants import Tenant
from kvtier.errors import TierRefused

OWNER, ALICE, BOB = Tenant("", sees_all=True), Tenant("alice"), Tenant("bob")


@pytest.fixture
def namespaces() -> Namespaces:
    return Namespaces(1 << 20)


def opened(namespaces: Namespaces, tenant: Tenant, number: int) -> MemorySpace:
    client_namespace = Namespace(number.to_bytes(32, "little"))
    return namespaces.open(tenant, tenant.own(client_namespace), client_namespace, "", SLOT_ALIGN_BYTES, 16, "{}")


def test_a_tenant_has_so_many_namespaces_and_takes_none_from_others(
    namespaces: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces_module, "MAX_TENANT_NAMESPACES", 3)
    spaces = [opened(namespaces, ALICE, number) for number in range(3)]

    with pytest.raises(TierRefused, match="3 namespaces are in use or have blocks in memory, which is the limit"):
        opened(namespaces, ALICE, 3)
    assert opened(namespaces, ALICE, 0) is spaces[0]
    opened(namespaces, BOB, 3)
    opened(namespaces, OWNER, 3)

    spaces[1].num_users = 0
    namespaces.forget_if_empty(spaces[1])
    opened(namespaces, ALICE, 3)


def test_unused_namespaces_are_looked_at_a_part_at_a_time(
    namespaces: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_spaces = 2 * SWEPT_AT_ONCE + 10
    for number in range(num_spaces):
        opened(namespaces, OWNER, number).num_users = 0
    asked: list[Namespace] = []

    left = []
    for _ in range(3):
        namespaces.forget_unused(lambda namespace: asked.append(namespace))
        left.append(len(namespaces))

    assert left == [num_spaces - SWEPT_AT_ONCE, 10, 0]
    assert len(asked) <= num_spaces
    namespaces.forget_unused(lambda namespace: None)
    namespaces.forget_unused(lambda namespace: None)
    assert namespaces.descriptions.get(Namespace(bytes(32))) is None


def test_a_page_is_made_of_what_the_asker_may_see_alone(namespaces: Namespaces) -> None:
    for number in range(20):
        opened(namespaces, ALICE, number)
    for number in range(3):
        opened(namespaces, BOB, number)
    asked: list[Namespace] = []

    def described(asker: Tenant, first: int, count: int) -> int:
        return len(namespaces.describe(lambda: [], lambda namespace: asked.append(namespace), asker, first, count))

    assert described(BOB, 0, 10) == len(asked) == 3
    assert [described(ALICE, first, 8) for first in (0, 8, 16, 24)] == [8, 8, 4, 0]
    assert [described(OWNER, first, 20) for first in (0, 20, 40)] == [20, 3, 0]
    assert described(Tenant("carol"), 0, 10) == 0
