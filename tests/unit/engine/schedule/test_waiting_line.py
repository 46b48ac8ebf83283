"""Clients take turns in the line of requests that wait."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.waiting_line import MAX_CLIENTS, WaitingLine


def request_of(client: str, prompt_tokens: int = 10, *, index: int = 0, name: str = "") -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(
        name or client, [1] * prompt_tokens, params, max_tokens=1, index=index, group=name or client, client=client
    )


def admit(line: WaitingLine) -> Request:
    request = line.popleft()
    line.note_admitted(request)
    return request


def clients_of(requests: Sequence[Request]) -> str:
    return "".join(request.client for request in requests)


def line_of(clients: str) -> WaitingLine:
    line = WaitingLine()
    for client in clients:
        line.join(request_of(client))
    return line


def test_a_client_alone_is_served_in_order() -> None:
    line = WaitingLine()
    requests = [request_of("a", 10 * number + 1, name=str(number)) for number in range(5)]
    for request in requests:
        line.join(request)

    assert [admit(line) for _ in range(5)] == requests


def test_clients_with_one_request_each_are_served_in_order() -> None:
    assert clients_of(line_of("cabed")) == "cabed"


def test_a_client_does_not_wait_for_all_that_another_has_in_the_line() -> None:
    line = line_of("aaaaaa")
    admit(line)
    line.join(request_of("b"))

    assert clients_of(line) == "baaaaa"


def test_clients_with_much_to_ask_take_turns() -> None:
    line = line_of("aaaabbb")
    line.join(request_of("c"))

    assert clients_of(line) == "abcababa"


def test_turns_are_by_tokens() -> None:
    line = WaitingLine()
    for _ in range(3):
        line.join(request_of("a", 40))
    for _ in range(8):
        line.join(request_of("b", 10))

    assert clients_of(line) == "abbbbabbbba"


def test_who_was_away_has_saved_nothing_up() -> None:
    line = line_of("aaaaaaaa")
    for _ in range(4):
        admit(line)
    for _ in range(4):
        line.join(request_of("b"))

    assert clients_of(line) == "babababa"  # the first of them are of one place, where it is first that has waited less


def test_answers_to_a_prompt_stay_together_and_each_counts() -> None:
    line = WaitingLine()
    for index in range(3):
        line.join(request_of("a", 10, index=index, name="first"))
    line.join(request_of("a", 10, name="second"))
    for number in range(4):
        line.join(request_of("b", 10, name=str(number)))

    assert clients_of(line) == "aaabbbab"


def test_one_that_had_to_wait_stays_in_front() -> None:
    line = line_of("aab")
    first = line.popleft()
    line.appendleft(first)
    line.join(request_of("c"))

    assert line[0] is first
    assert clients_of(line) == "abca"


def test_clients_of_before_are_forgotten() -> None:
    line = WaitingLine()
    line.join(request_of("waits"))
    for number in range(3 * MAX_CLIENTS):
        line.join(request_of(str(number)))
        line.remove(line[-1])

    assert len(line._of_clients) <= MAX_CLIENTS
    admit(line)
    line.join(request_of("again"))
    assert list(line._of_clients) == ["again"]


@given(
    st.lists(
        st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.integers(1, 50))),
        max_size=80,
    )
)
def test_of_two_who_both_wait_none_gets_more_than_a_prompt_ahead(events: list[tuple[str, int] | None]) -> None:
    """An event is a request that comes, or an admission. Nobody is lost, and a client's own stay in order."""
    line = WaitingLine()
    joined: list[Request] = []
    admitted: list[Request] = []
    backlogged_since: dict[str, int] = {}
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            request = request_of(*event)
            line.join(request)
            joined.append(request)
            backlogged_since.setdefault(request.client, len(admitted))
        elif line:
            admitted.append(admit(line))
        for client in [client for client in backlogged_since if client not in clients_of(line)]:
            del backlogged_since[client]
        for one in backlogged_since:
            for other in backlogged_since:
                begin = max(backlogged_since[one], backlogged_since[other])
                had = {
                    name: sum(r.prompt_tokens for r in admitted[begin:] if r.client == name) for name in (one, other)
                }
                assert had[one] - had[other] <= 100  # the largest prompt of each

    assert not line
    assert len(admitted) == len(joined)
    for client in "abc":
        assert [r for r in admitted if r.client == client] == [r for r in joined if r.client == client]
