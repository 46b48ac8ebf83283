"""Log-ins of the page: bounded, and over when their time is."""

from __future__ import annotations

from kvtier.api.access import ApiTenant
from kvtier.api.limits import MAX_PAGE_SESSIONS, MAX_PAGE_SESSIONS_OF_KEY, PAGE_SESSION_S
from kvtier.api.page.sessions import Sessions

ALICE = ApiTenant("alice")


def test_a_session_ends_when_its_time_is_over() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    session_id, session = sessions.begin(ALICE)
    assert sessions.get(session_id) is session

    now = PAGE_SESSION_S
    assert sessions.get(session_id) is None
    assert len(sessions) == 0


def test_a_key_has_so_many_sessions_and_all_keys_so_many() -> None:
    sessions = Sessions()
    first, _ = sessions.begin(ALICE)
    for _ in range(MAX_PAGE_SESSIONS_OF_KEY):
        sessions.begin(ALICE)
    assert sessions.get(first) is None
    assert len(sessions) == MAX_PAGE_SESSIONS_OF_KEY

    for number in range(MAX_PAGE_SESSIONS + 10):
        sessions.begin(ApiTenant(f"key {number}"))
    assert len(sessions) == MAX_PAGE_SESSIONS


def test_ids_and_tokens_are_random_and_unknown_ones_are_nobodys() -> None:
    sessions = Sessions()
    found = [sessions.begin(ALICE) for _ in range(3)]

    assert len({session_id for session_id, _ in found} | {one.csrf for _, one in found}) == 6
    assert sessions.get("") is None
    assert sessions.get("x" * 10_000) is None
    assert sessions.get(found[0][0] + "x") is None
    assert not found[0][1].knows("é")
