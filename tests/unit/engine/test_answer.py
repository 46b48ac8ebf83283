"""The text of an answer as it grows, with a source that turns numbers into given pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.answer import AnswerText, completion_of
from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.request import Request


class Pieces:
    """Token i is the text of piece i; `rest` comes at the end."""

    def __init__(self, *pieces: str, rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token_ids: list[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def finish(self) -> str:
        return self._rest


def shown(pieces: list[str], stop_strings: tuple[str, ...], *, min_tokens: int = 0) -> tuple[AnswerText, list[str]]:
    """Push pieces until the text is stopped; what was shown after each."""
    text = AnswerText(Pieces(*pieces), stop_strings, min_tokens=min_tokens)
    taken = []
    for token_id in range(len(pieces)):
        is_stopped = text.push(token_id)
        taken.append(text.take())
        if is_stopped:
            break
    text.finish()
    taken.append(text.take())
    return text, taken


def test_without_stop_strings_every_piece_is_shown_at_once() -> None:
    _, taken = shown(["He", "llo", " you"], ())

    assert taken == ["He", "llo", " you", ""]


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    text, taken = shown(["answer: 4", "\n", "\nQ"], ("\n\nQ",))

    assert text.text == "".join(taken) == "answer: 4"
    assert "\n" not in "".join(taken)


def test_what_was_held_back_for_nothing_is_shown_at_the_end() -> None:
    text, taken = shown(["a", "S", "T"], ("STOP",))

    assert not text.is_stopped
    assert "".join(taken) == "aST"


def test_the_earliest_stop_string_ends_the_text() -> None:
    text, _ = shown(["abcdef"], ("ef", "bc"))

    assert text.text == "a"


def test_the_stop_string_that_ended_a_text_is_known() -> None:
    stopped, _ = shown(["a", "END", "X"], ("X", "END"))
    whole, _ = shown(["a", "b"], ("X", "END"))

    assert (stopped.stop, whole.stop) == ("END", None)


def test_half_a_character_is_shown_at_the_end() -> None:
    text = AnswerText(Pieces("a", "", rest="�"), ())
    text.push(0)
    text.push(1)

    text.finish()

    assert text.take() == "a�"


def test_a_stop_string_in_what_comes_last_counts() -> None:
    text = AnswerText(Pieces("ab", rest="c"), ("bc",))
    text.push(0)

    text.finish()

    assert text.text == text.take() == "a"


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = AnswerText(None, ())

    assert not text.push(5)
    text.finish()

    assert text.take() == ""


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, ""), (1, ""), (2, "xa"), (3, "xaxa"), (9, "xaxaxaxa")])
def test_stop_strings_count_from_the_token_that_completes_min_tokens(min_tokens: int, expected: str) -> None:
    text, taken = shown(["xa"] * 4, ("xa",), min_tokens=min_tokens)

    assert text.text == "".join(taken) == expected


@given(pieces=st.lists(st.text("abS", max_size=4), max_size=12), stops=st.lists(st.text("abS", min_size=1), max_size=3))
def test_any_cut_of_a_text_shows_it_up_to_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """Pieces may show more of it than one token did, so the end is where the token ended that completed the string."""
    text, taken = shown(pieces, tuple(stops))

    seen = ""
    for piece in pieces:
        seen += piece
        ends = [seen.find(stop) for stop in stops if stop in seen]
        if ends:
            seen = seen[: min(ends)]
            break
    assert "".join(taken) == text.text == seen


def test_a_completion_before_its_first_token_has_no_times() -> None:
    request = Request("one", [1, 2], SamplingParams(), max_tokens=4)

    completion = completion_of(request, "")

    assert completion.token_ids == []
    assert completion.ttft_s == completion.time_per_output_token_s == 0.0
    assert completion.logprobs is None
    assert completion.cached_tokens == {"device": 0}
