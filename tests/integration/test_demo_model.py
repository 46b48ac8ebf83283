"""The model in examples/model finds facts in chronicles, and can be trained again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.village import SMALL_TALK, make_chronicle
from kvtier import LLM, SamplingParams
from kvtier.models.tokenizer import Tokenizer
from tests.support.document_code import ROOT
from tests.support.waiting import LIMIT_S

MODEL = ROOT / "examples/model"
MOST_BYTES = 4_000_000
GREEDY = SamplingParams(max_tokens=40, temperature=0)


def _answers(questions: list[str]) -> list[str]:
    tokenizer = Tokenizer(MODEL)
    prompts = [tokenizer.encode(f"<|user|>{question}<|end|><|assistant|>") for question in questions]
    with LLM(str(MODEL)) as llm:
        return [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]


def test_it_is_small_enough_for_the_repository() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MOST_BYTES


def test_it_finds_facts_and_knows_its_small_talk() -> None:
    text, facts = make_chronicle(500, seed=7)
    asked = [(f"{text}\n\n{question}", fact.sentence) for fact in facts for question in fact.questions]

    *found, kvtier = _answers([*(question for question, _ in asked), "What is kvtier?"])

    assert found == [answer for _, answer in asked]
    assert kvtier == dict(SMALL_TALK)["What is kvtier?"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_it_finds_facts_in_chronicles_as_long_as_the_demo_s(seed: int) -> None:
    text, facts = make_chronicle(1000, seed=seed)

    answers = _answers([f"{text}\n\n{fact.questions[0]}" for fact in facts])

    assert sum(answer == fact.sentence for answer, fact in zip(answers, facts, strict=True)) >= len(facts) - 1


@pytest.mark.slow
def test_it_can_be_trained_again(tmp_path: Path) -> None:
    """In a hundredth of the steps, which is not enough to answer, but a model that loads."""
    done = subprocess.run(
        [sys.executable, "scripts/train_demo_model.py", "--folder", str(tmp_path / "model"), "--scale", "0.01"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )

    assert done.returncode == 0, done.stderr
    names = {path.name for path in MODEL.iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (tmp_path / "model" / name).read_bytes() == (MODEL / name).read_bytes(), name
