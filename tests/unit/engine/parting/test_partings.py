"""Prompts compared with earlier ones: how they part, in which message, why, and how much of that is told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.engine.parting import partings as partings_module
from kvtier.engine.parting.message_place import ChatInput, message_of
from kvtier.engine.parting.partings import AskedPrompt, Partings
from kvtier.models.tokenizer import Tokenizer
from kvtier.observe.metrics import PartingMetrics
from kvtier.testing.tiny_models import make_tiny_tokenizer
from kvtier.tiers.parting import Cause, How, Parting
from tests.support.waiting import LIMIT_S

PLAIN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|role|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)
STAMPED = "Date: {{ strftime_now('%H:%M:%S.%f') }}\n" + PLAIN
PAIRED = (
    "{% if messages | length % 2 == 0 and not add_generation_prompt %}{{ raise_exception('pairs') }}{% endif %}" + PLAIN
)
NUMBERED = "{{ messages | length }} messages\n" + PLAIN
ADD = {"type": "function", "function": {"name": "add"}}
FIND = {"type": "function", "function": {"name": "find"}}


def tokenizer_of(folder: Path, template: str = PLAIN) -> Tokenizer:
    inner = make_tiny_tokenizer()
    inner.chat_template = template
    inner.save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return tokenizer_of(tmp_path)


class Session:
    """Whoever asks: chats and texts, each with an id of its own."""

    def __init__(self, tokenizer: Tokenizer, partings: Partings, *, salt: str = "", session: str = "s") -> None:
        self.tokenizer = tokenizer
        self.partings = partings
        self.salt = salt
        self.session = session
        self.num_asked = 0

    @property
    def last_id(self) -> str:
        return f"{self.salt}-{self.session}-{self.num_asked}"

    def chat(self, *contents: str, tools: Sequence[dict[str, object]] = (), answer: str = "") -> Parting:
        """User and assistant take turns. What it is to earlier ones, as far as it is known at once."""
        roles = ("user", "assistant")
        messages: list[dict[str, object]] = [
            {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
        ]
        chat = ChatInput(messages, {}, list(tools))
        tokens = self.tokenizer.apply_chat_template(messages, tools=list(tools) or None)
        return self._ask(AskedPrompt(self._next_id(), tokens, self.salt, self.session, tools, lambda: chat), answer)

    def text(self, text: str, answer: str = "") -> Parting:
        return self._ask(AskedPrompt(self._next_id(), self.tokenizer.encode(text), self.salt, self.session), answer)

    def explained(self) -> Parting:
        found = self.partings.explain(self.last_id)
        assert found is not None
        return found

    def _next_id(self) -> str:
        self.num_asked += 1
        return self.last_id

    def _ask(self, asked: AskedPrompt, answer: str) -> Parting:
        found = self.partings.compare(asked)
        assert found is not None
        assert self.partings.noted(asked.request_id) == found
        if answer:
            self.partings.finish(asked.request_id, self.tokenizer.encode(answer))
        return found


@pytest.fixture
def session(tokenizer: Tokenizer) -> Session:
    return Session(tokenizer, Partings(tokenizer, shows_text=True))


# --- how ------------------------------------------------------------------------------------------------------------


def test_the_first_prompt_has_nothing_to_be_compared_with(session: Session) -> None:
    found = session.text("Once")

    assert found == Parting(how=How.NOTHING_RECORDED, token=0, prompt_tokens=4)
    assert session.explained() == found


def test_a_history_that_grows_is_a_continuation_of_prompt_and_answer(session: Session) -> None:
    first = session.chat("Hello", answer="Hi.<|end|>")

    second = session.chat("Hello", "Hi.", "How are you?")

    assert (second.how, second.same_session) == (How.CONTINUED, True)
    assert second.token == second.recorded_tokens == first.prompt_tokens + len("Hi.") + 1
    assert second.causes == []


def test_a_prompt_that_is_asked_again_is_repeated(session: Session) -> None:
    session.chat("Hello", answer="Hi.<|end|>")

    found = session.chat("Hello")

    assert (found.how, found.token) == (How.REPEATED, found.prompt_tokens)


def test_an_answer_that_came_back_without_its_reasoning_is_told_with_its_message(session: Session) -> None:
    first = session.chat("Hello", answer="<think>Hm.</think>OK<|end|>")

    session.chat("Hello", "OK", "And?")
    found = session.explained()

    assert (found.how, found.in_answer, found.token) == (How.PARTED, True, first.prompt_tokens)
    assert (found.message, found.role, found.causes) == (2, "assistant", [Cause.REASONING])
    assert found.recorded.startswith("<think>")
    assert found.now.startswith("OK<|end|>")
    assert found.before.endswith("stant\n")
    assert "message 2 (assistant): cached '<think>" in found.sentence()


def test_a_message_that_was_edited_is_the_one_that_is_named(session: Session) -> None:
    session.chat("One is here", "Two is here", "Three is here", "Four is here", "Five is here")

    session.chat("One is here", "Two is here", "Three was here", "Four is here", "Five is here")
    found = session.explained()

    assert (found.message, found.role) == (3, "user")
    assert (found.recorded[:2], found.now[:3]) == ("is", "was")


def test_what_only_asks_for_an_answer_is_no_message(session: Session) -> None:
    session.chat("Hello", "Hi", "Yes")

    session.chat("Hello", "Hi", "Yes", "No", "Hm")
    session.chat("Hello", "Hi", "Yes")
    session.chat("Hello", "Hi")
    found = session.explained()

    assert (found.how, found.message) == (How.PARTED, None)


def test_text_has_no_message_number(session: Session) -> None:
    session.text("The sky is blue.")

    session.text("The sky was blue.")
    found = session.explained()

    assert (found.how, found.message, found.role) == (How.PARTED, None, "")
    assert (found.recorded, found.now) == ("is blue.", "was blue")


def test_without_leave_no_text_is_told_but_place_and_message_are(tokenizer: Tokenizer) -> None:
    session = Session(tokenizer, Partings(tokenizer))
    session.chat("secret one", "answer")

    session.chat("secret two", "answer")
    found = session.explained()

    assert (found.how, found.message, found.role) == (How.PARTED, 1, "user")
    assert (found.before, found.recorded, found.now) == ("", "", "")
    assert "secret" not in found.sentence()


def test_a_model_without_a_tokenizer_has_places_only() -> None:
    partings = Partings(None, shows_text=True)
    partings.compare(AskedPrompt("one", [1, 2, 3, 4]))
    found = partings.compare(AskedPrompt("two", [1, 2, 9, 4]))

    assert found == partings.explain("two")
    assert found is not None
    assert (found.how, found.token, found.recorded_tokens) == (How.PARTED, 2, 4)


def test_what_is_no_prompt_is_not_compared(tokenizer: Tokenizer) -> None:
    partings = Partings(tokenizer)

    assert partings.compare(AskedPrompt("one", [])) is None
    assert partings.compare(AskedPrompt("two", [-1])) is None
    assert partings.explain("one") is partings.noted("two") is None


def test_a_prompt_that_was_refused_is_compared_with_no_other(session: Session) -> None:
    session.text("The sky is blue.")
    session.text("The sky is blue. And more")
    session.partings.forget(session.last_id)
    session.partings.forget("no such request")

    found = session.text("The sky is blue. And less")

    assert (found.how, found.token) == (How.CONTINUED, found.recorded_tokens)


# --- tenants --------------------------------------------------------------------------------------------------------


def test_a_tenant_learns_nothing_of_anothers_prompts(tokenizer: Tokenizer) -> None:
    partings = Partings(tokenizer, shows_text=True)
    Session(tokenizer, partings, salt="one").chat("The secret is here", answer="Well<|end|>")
    for name in ("s", ""):
        other = Session(tokenizer, partings, salt="other", session=name)
        found = other.chat("The secret is near")
        assert (found.how, found.token) == ((How.NOTHING_RECORDED, 0) if name else (How.REPEATED, found.prompt_tokens))
        assert other.explained() == found

    own = Session(tokenizer, partings, salt="one", session="t")
    assert own.chat("The secret is near").how is How.PARTED


def test_sessions_of_one_name_are_others_for_other_tenants(tokenizer: Tokenizer) -> None:
    partings = Partings(tokenizer)
    Session(tokenizer, partings, salt="one").text("abc")

    assert Session(tokenizer, partings, salt="other").text("abd").how is How.NOTHING_RECORDED
    assert not Session(tokenizer, partings, salt="one", session="t").text("abd").same_session
    same = Session(tokenizer, partings, salt="one")
    same.num_asked = 5
    assert same.text("abe").same_session


# --- the lint -------------------------------------------------------------------------------------------------------


def test_a_date_at_the_head_is_told_and_from_the_second_time_on_as_one_of_each_time(session: Session) -> None:
    found = [session.chat(f"It is 10:17:0{number}. Be kind.", "Yes", "Go on" * 20) for number in range(4)]

    assert [one.each_time for one in found] == [False, False, True, True]
    assert [one.causes for one in found] == [[], *[[Cause.DATE]] * 3]
    assert len(found[-1].advice()) == 2


def test_prompts_without_a_session_are_told_of_a_cause_that_comes_again(tokenizer: Tokenizer) -> None:
    asking = Session(tokenizer, Partings(tokenizer), session="")
    found = [asking.text(f"id 9f86d081884c7d6{number}: {text}") for number, text in enumerate(("one", "two", "three"))]

    assert [one.causes for one in found] == [[], [Cause.ID], [Cause.ID]]
    assert [one.each_time for one in found] == [False, False, True]
    assert not any(one.same_session for one in found)


def test_prompts_that_merely_differ_get_no_advice(tokenizer: Tokenizer) -> None:
    asking = Session(tokenizer, Partings(tokenizer), session="")
    found = [asking.text(text) for text in ("Alpha is first", "Beta is second", "Gamma is third")]

    assert [one.advice() for one in found] == [[], [], []]


def test_an_answer_that_changed_is_not_a_changing_head(session: Session) -> None:
    for number in range(4):
        session.chat("Hello", answer=f"{number} is mine<|end|>")
        found = session.chat("Hello", f"{number + 5} is mine", "And?")
        assert (found.in_answer, found.each_time) == (True, False)


def test_tools_in_another_order_are_told(session: Session) -> None:
    session.chat("Hello", tools=[ADD, FIND])

    found = session.chat("Hello", tools=[FIND, ADD])

    assert found.causes == [Cause.TOOLS_REORDERED]


def test_a_template_that_stamps_a_date_is_told_from_a_client_that_does(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, STAMPED)
    session = Session(tokenizer, Partings(tokenizer))
    session.chat("Hello")

    found = session.chat("Hello")

    assert tokenizer.stamps_date
    assert found.causes == [Cause.TEMPLATE_DATE, Cause.DATE]
    assert session.explained().message is None  # by now the template writes another time


def test_heads_that_change_are_counted_by_cause(tokenizer: Tokenizer) -> None:
    metrics = PartingMetrics()
    session = Session(tokenizer, Partings(tokenizer, metrics=metrics))
    for number in range(3):
        session.text(f"It is 10:17:0{number}. Be kind.")
    session.text("Unlike all others")
    session.text("Unlike all others, and longer")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"kvtier_engine_{name}_total", labels)

    assert value("parted_heads", cause="date") == 2.0
    assert value("parted_heads", cause="other") == 1.0
    assert value("compared_prompts", how="parted") == 3.0
    assert value("compared_prompts", how="continued") == 1.0
    assert value("compared_prompts", how="nothing_recorded") == 1.0


# --- message numbers ------------------------------------------------------------------------------------------------


def test_every_token_of_a_chat_lies_in_the_message_it_was_rendered_for(tokenizer: Tokenizer) -> None:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": f"the word {number} in other" * (number + 1)} for number in range(9)
    ]
    tokens = tokenizer.apply_chat_template(messages)
    ends = [
        len(tokenizer.apply_chat_template(messages[: number + 1], add_generation_prompt=False)) for number in range(9)
    ]
    for position in range(0, len(tokens), 5):
        expected = next((number for number, end in enumerate(ends) if position < end), None)
        assert message_of(tokenizer, ChatInput(messages), tokens, position) == expected


def test_a_template_that_takes_no_odd_beginning_gives_a_number_where_it_can(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, PAIRED)
    messages: list[dict[str, object]] = [{"role": "user", "content": f"the word {number}"} for number in range(3)]
    tokens = tokenizer.apply_chat_template(messages)

    assert message_of(tokenizer, ChatInput(messages), tokens, 2) == 0
    assert message_of(tokenizer, ChatInput(messages), tokens, len(tokens) // 2) is None


def test_a_template_whose_beginning_depends_on_all_gives_no_number(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, NUMBERED)
    messages: list[dict[str, object]] = [{"role": "user", "content": f"the word {number}"} for number in range(4)]
    tokens = tokenizer.apply_chat_template(messages)

    assert message_of(tokenizer, ChatInput(messages), tokens, 20) is None


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_old_chats_and_old_partings_are_dropped(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partings_module, "_MAX_KEPT_BYTES", 3_000)
    monkeypatch.setattr(partings_module, "_MAX_PARTINGS", 6)
    session = Session(tokenizer, Partings(tokenizer, shows_text=True))
    for number in range(9):
        session.chat(f"{number} " + "word " * 60)

    known = [session.partings.explain(f"-s-{number}") for number in range(1, 10)]

    assert [one is not None for one in known] == [False] * 3 + [True] * 6
    messages = [one.message for one in known if one is not None]
    assert (messages[0], messages[-1]) == (None, 1)
    assert all(one.now for one in known if one is not None)


def test_threads_may_ask_and_finish_at_once(tokenizer: Tokenizer) -> None:
    partings = Partings(tokenizer, shows_text=True)
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            session = Session(tokenizer, partings, salt=str(number % 2), session=str(number))
            for turn in range(30):
                session.chat(f"{turn % 3} hello" + "x" * turn, answer="fine<|end|>")
                session.explained()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
