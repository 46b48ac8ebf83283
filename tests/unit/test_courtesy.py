"""Threads that give way."""

from __future__ import annotations

import threading

from kvtier.courtesy import be_courteous, give_way


def test_a_thread_gives_way_as_it_said_and_no_other_does() -> None:
    calls: list[str] = []

    def work() -> None:
        be_courteous(lambda: calls.append(threading.current_thread().name))
        give_way()
        give_way()
        be_courteous(None)
        give_way()

    thread = threading.Thread(target=work, name="courteous")
    thread.start()
    thread.join()
    give_way()

    assert calls == ["courteous", "courteous"]
