"""What engines say of their last requests: the newest, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.cacheserver.notes import Notes

ids = st.sampled_from("abcdef")


@given(st.lists(st.tuples(ids, st.text(max_size=8))))
def test_the_newest_notes_stay_and_the_bounds_hold(puts: list[tuple[str, str]]) -> None:
    notes, model = Notes(max_notes=3, max_chars=12), dict[str, str]()
    for request_id, text in puts:
        notes.put(request_id, text)
        model.pop(request_id, None)
        model[request_id] = text
        while len(model) > 3 or sum(map(len, model.values())) > 12:
            del model[next(iter(model))]

        assert (len(notes), notes.num_chars) == (len(model), sum(map(len, model.values())))
    assert {request_id: notes.get(request_id) for request_id in "abcdef"} == dict.fromkeys("abcdef", "") | model


def test_a_note_larger_than_all_of_them_may_be_is_not_kept() -> None:
    notes = Notes(max_notes=3, max_chars=12)
    notes.put("small", "text")
    notes.put("large", "t" * 13)

    assert (len(notes), notes.num_chars, notes.get("large")) == (0, 0, "")


def test_by_default_the_last_four_thousand_stay() -> None:
    notes = Notes()
    for number in range(10_000):
        notes.put(f"request-{number}", "{}")

    assert len(notes) == 4096
    assert (notes.get("request-5903"), notes.get("request-5904")) == ("", "{}")
