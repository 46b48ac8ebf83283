"""Whose a temporary file is, and whether that process can still be there."""

from __future__ import annotations

import os
import subprocess
import sys

from kvtier.vineyard.file_owner import give_up_name, is_surely_dead, owner_name


def test_no_two_owners_have_one_name() -> None:
    assert owner_name() != owner_name()


def test_a_living_process_is_not_dead() -> None:
    assert not is_surely_dead(owner_name())


def test_a_name_that_its_process_has_given_up_is_nobodys() -> None:
    given_up, other = owner_name(), owner_name()
    give_up_name(given_up)
    give_up_name(given_up)

    assert is_surely_dead(given_up)
    assert not is_surely_dead(other)


def test_a_process_that_has_ended_is() -> None:
    code = "from kvtier.vineyard.file_owner import owner_name; print(owner_name())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert is_surely_dead(done.stdout.strip())


def test_a_later_process_of_the_same_number_is_another() -> None:
    machine, pid, started_at, chance = owner_name().split(".")

    assert pid == str(os.getpid())
    assert is_surely_dead(f"{machine}.{pid}.{int(started_at) - 1}.{chance}")


def test_of_other_machines_and_of_names_that_are_none_nothing_is_known() -> None:
    _, pid, started_at, chance = owner_name().split(".")

    assert not is_surely_dead(f"0123456789ab.{pid}.{int(started_at) - 1}.{chance}")
    assert not is_surely_dead("somebody")
    assert not is_surely_dead("a.b.c.d")
