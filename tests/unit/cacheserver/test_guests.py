"""Who gets a place: strangers of one address do not shut out another's, nor their own."""

from __future__ import annotations

import pytest

from kvtier.cacheserver.guests import MAX_TCP_STRANGERS, Guests
from kvtier.cacheserver.tenants import Tenant


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Peer:
    def __init__(self, address: str = "") -> None:
        self.address = address
        self.is_unix = not address
        self.is_shut_down = False

    def shut_down(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guests(clock: Clock) -> Guests:
    return Guests(64, clock)


def arrived(guests: Guests, address: str, count: int) -> list[Peer]:
    peers = [Peer(address) for _ in range(count)]
    assert [guests.arrive(peer) for peer in peers] == [None] * count
    return peers


def test_an_address_with_many_strangers_makes_room_for_another_at_once(guests: Guests) -> None:
    first = Peer("192.0.2.2")
    assert guests.arrive(first) is None
    crowd = arrived(guests, "192.0.2.1", MAX_TCP_STRANGERS - 1)

    late = Peer("192.0.2.3")
    assert guests.arrive(late) is None

    assert [peer.is_shut_down for peer in crowd] == [True] + [False] * (len(crowd) - 1)
    assert not first.is_shut_down  # it came before, and is no crowd
    guests.let_in(first, Tenant("a"))
    guests.let_in(late, Tenant("a"))
    assert guests.num_clients == 2


def test_an_address_that_connects_all_the_time_does_not_shut_itself_out(guests: Guests, clock: Clock) -> None:
    """Its own client may be among them: a place is free again long before a second has passed."""
    crowd = arrived(guests, "192.0.2.1", MAX_TCP_STRANGERS)
    sentence = guests.arrive(Peer("192.0.2.1"))
    assert sentence is not None
    assert "32 connections have not authenticated yet" in sentence

    clock.now_s = 0.1
    arrived(guests, "192.0.2.1", MAX_TCP_STRANGERS)
    assert all(peer.is_shut_down for peer in crowd)


def test_one_stranger_each_of_many_addresses_keeps_its_place_for_a_moment(guests: Guests, clock: Clock) -> None:
    peers = [arrived(guests, f"192.0.2.{number}", 1)[0] for number in range(MAX_TCP_STRANGERS)]
    assert guests.arrive(Peer("198.51.100.1")) is not None

    clock.now_s = 0.1
    assert guests.arrive(Peer("198.51.100.1")) is None
    assert [peer.is_shut_down for peer in peers] == [True] + [False] * (MAX_TCP_STRANGERS - 1)


def test_a_process_of_this_host_has_a_second_to_say_who_it_is(guests: Guests, clock: Clock) -> None:
    crowd = arrived(guests, "", 32)
    clock.now_s = 0.9
    assert guests.arrive(Peer()) is not None
    clock.now_s = 1.0
    assert guests.arrive(Peer()) is None
    assert crowd[0].is_shut_down
