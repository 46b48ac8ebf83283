"""The chronicle that the demo's model reads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples import village


def test_the_same_seed_writes_the_same_chronicle() -> None:
    assert village.make_chronicle(2000, seed=3) == village.make_chronicle(2000, seed=3)
    assert village.make_chronicle(2000, seed=3) != village.make_chronicle(2000, seed=4)


def test_every_fact_stands_in_the_chronicle_once_and_is_about_another_key() -> None:
    text, facts = village.make_chronicle(8000)

    assert all(text.count(fact.sentence) == 1 for fact in facts)
    assert len({fact.key for fact in facts}) == len(facts)
    assert all(fact.key in question for fact in facts for question in fact.questions)


def test_other_sentences_name_no_key_and_no_value() -> None:
    """Otherwise a question would have two answers."""
    keys = {fact.key for fact in village.make_facts(random.Random(0), village.MOST_FACTS)}
    values = {fact.value for seed in range(20) for fact in village.make_facts(random.Random(seed), village.MOST_FACTS)}
    dice = random.Random(1)
    words = {word.strip(".,") for _ in range(3000) for word in village.filler(dice).split()}

    assert not words & keys
    assert not words & values - {"two"}


@pytest.mark.parametrize("num_tokens", [1, 500, 1_000_000])
def test_a_chronicle_of_any_length_has_a_fact(num_tokens: int) -> None:
    _, facts = village.make_chronicle(num_tokens)

    assert 1 <= len(facts) <= village.MOST_FACTS


def test_the_command_writes_a_file_and_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "village.txt"
    monkeypatch.setattr("sys.argv", ["village", "--tokens", "600", "--filename", str(file)])

    assert village.main() == 0

    text, facts = village.make_chronicle(600)
    assert file.read_text() == text + "\n"
    assert facts[0].questions[0] in capsys.readouterr().out
