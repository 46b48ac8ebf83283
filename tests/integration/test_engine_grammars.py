"""Answers that follow grammars, through the engine: whatever the weights say, the text is a sentence of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.client import EngineClient
from kvtier.engine.constraint.constraints import Constraints
from kvtier.engine.device.sampler import SampledTokens, Sampler
from kvtier.engine.grammar import DEAD_END, JSON_OBJECT, Grammar
from kvtier.engine.schedule.step import Step
from kvtier.errors import InvalidParameter
from kvtier.testing.tiny_models import make_tiny_tokenizer, save_tiny_model

torch.set_num_threads(1)

PROMPT = list(range(40, 60))
END, ROLE = 256, 257
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/leaf"}, "is": {"type": "boolean"}},
                       "required": ["left", "is"], "additionalProperties": False},
              "leaf": {"anyOf": [{"type": "null"}, {"const": 3}, {"type": "string", "pattern": "^[ab]{2}$"}]}},
    "$ref": "#/$defs/node",
}  # fmt: skip
SCHEMAS: Sequence[Mapping[str, object]] = (PERSON, NESTED, {"enum": [1, "two", None]}, {"type": "number", "maximum": 9})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture(scope="module", params=["sync", "async-1", "async-2"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(folder, schedule=request.param) as opened:
        yield opened


def open_llm(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", kv_cache_space=1 << 20, **settings)


def params(grammar: Grammar | None, **settings: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 300, "grammar": grammar, **settings})


def ask(llm: LLM, grammar: Grammar | None, **settings: object) -> list[Completion]:
    [output] = llm.generate(PROMPT, params(grammar, **settings), progress=False)
    assert output.error is None, output.error
    return output.outputs


def schema_of(schema: Mapping[str, object]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def check(answer: Completion, schema: Mapping[str, object]) -> None:
    assert answer.finish_reason == "stop", answer.text
    jsonschema.validate(json.loads(answer.text), schema)


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("schema", SCHEMAS, ids=["person", "nested", "enum", "number"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
def test_an_answer_is_json_of_its_schema(llm: LLM, schema: Mapping[str, object], settings: dict[str, object]) -> None:
    [answer] = ask(llm, schema_of(schema), **settings)

    check(answer, schema)


def test_an_object_of_any_kind_is_an_object(llm: LLM) -> None:
    answers = ask(llm, JSON_OBJECT, temperature=0.7, seed=1, n=8)

    complete = [answer for answer in answers if answer.finish_reason == "stop"]
    assert complete, "none of them ended"
    assert all(isinstance(json.loads(answer.text), dict) for answer in complete)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 2, "top_p": 0.8, "repetition_penalty": 1.5},
        {"temperature": 1.5, "seed": 3, "top_k": 5, "min_p": 0.01},
        {"presence_penalty": 1.0, "min_tokens": 3, "logprobs": 0},
        {"ignore_eos": True},
        {"ignore_eos": True, "min_tokens": 290},
    ],
    ids=["logprobs", "penalty", "top-k", "min-tokens", "ignore-eos", "longer-than-the-grammar"],
)
def test_other_parameters_go_along(llm: LLM, settings: dict[str, object]) -> None:
    [answer] = ask(llm, schema_of(PERSON), **settings)

    check(answer, PERSON)


def test_each_of_several_answers_follows_the_grammar_by_itself(llm: LLM) -> None:
    answers = ask(llm, schema_of(PERSON), n=5, temperature=1.0, seed=7)

    for answer in answers:
        check(answer, PERSON)
    assert len({answer.text for answer in answers}) > 1


@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_copies_of_a_grammar_change_no_answer(folder: Path, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of several prompts, whose matchers are in one copy or in four; each copy is given back in the end."""
    texts = {}
    for num_threads in (1, 4):
        monkeypatch.setattr("kvtier.engine.constraint.compiler.num_mask_threads", lambda one=num_threads: one)
        with open_llm(folder, schedule=schedule) as llm, EngineClient(llm.engine) as client:
            asked = params(schema_of(PERSON), temperature=1.0, seed=3, n=5)
            streams = [client.submit([*PROMPT, number], asked) for number in range(3)]
            texts[num_threads] = [answer.text for stream in streams for answer in stream.wait()]
            compiled = llm.engine.grammars.find(schema_of(PERSON))
            assert compiled is not None
            assert compiled.num_copies == num_threads
            client.settle(60)
            assert {compiled.take_copy().num_users for _ in range(num_threads)} == {1}

    assert len(texts[1]) == 15
    assert texts[1] == texts[4]


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    [free] = ask(llm, None, max_tokens=1, logprobs=3)
    [answer] = ask(llm, Grammar("regex", "[a-z]{2}"), logprobs=3)

    assert free.logprobs is not None
    assert answer.logprobs is not None
    best = set(free.logprobs[0].items())
    assert best <= set(answer.logprobs[0].items()), "the likeliest tokens are those of the model, forbidden or not"


def test_a_regular_expression_a_choice_and_rules(llm: LLM) -> None:
    [regex] = ask(llm, Grammar("regex", r"[a-f]{4}-\d{2}"))
    [choice] = ask(llm, Grammar("lark", 'start: "yes" | "no" | "maybe"'))
    [rules] = ask(llm, Grammar("lark", 'start: "<call>" %json {"type": "boolean"} "</call>"'))
    [gbnf] = ask(llm, Grammar("lark", 'root ::= "a" ("b" | "c") "d"'))

    assert re.fullmatch(r"[a-f]{4}-\d{2}", regex.text)
    assert choice.text in ("yes", "no", "maybe")
    assert re.fullmatch(r"<call>(true|false)</call>", rules.text)
    assert gbnf.text in ("abd", "acd")
    assert {one.finish_reason for one in (regex, choice, rules, gbnf)} == {"stop"}


def test_a_special_token_comes_where_a_grammar_names_it_and_nowhere_else(llm: LLM) -> None:
    [named] = ask(llm, Grammar("lark", 'start: <|role|> "a"'))
    answers = ask(llm, Grammar("regex", r"(?s).{40}"), temperature=1.5, seed=1, n=6)

    assert named.token_ids == [ROLE, ord("a")]
    assert not any({END, ROLE} & set(answer.token_ids) for answer in answers)


def test_blanks_between_the_parts_of_json_are_few(llm: LLM) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    inside = Grammar("lark", f"start: %json {json.dumps(schema)}")

    for grammar in (schema_of(schema), inside):
        for answer in ask(llm, grammar, n=6, temperature=2.0, seed=5):
            check(answer, schema)
            assert all(len(blank) <= 33 for blank in re.findall(r"\s+", answer.text))


def test_a_grammar_that_may_go_on_ends_at_the_end_of_text(llm: LLM) -> None:
    answers = ask(llm, Grammar("regex", "a+"), n=8, temperature=2.0, seed=1)

    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert ended
    for answer in ended:
        assert answer.token_ids[-1] == END
        assert re.fullmatch("a+", answer.text)


def test_without_an_end_of_text_such_an_answer_has_all_its_tokens(llm: LLM) -> None:
    [ignoring] = ask(llm, Grammar("regex", "a+"), ignore_eos=True, max_tokens=20)
    [bounded] = ask(llm, Grammar("regex", "a{1,5}"), ignore_eos=True)

    assert (ignoring.text, ignoring.finish_reason) == ("a" * 20, "length")
    assert (bounded.text, bounded.finish_reason) == ("a" * 5, "stop")


def test_no_end_comes_before_min_tokens(llm: LLM) -> None:
    [answer] = ask(llm, Grammar("regex", "a+"), min_tokens=12, temperature=2.0, seed=3)

    assert len(answer.token_ids) >= 12


def test_stop_strings_end_an_answer_within_its_grammar(llm: LLM) -> None:
    [whole] = ask(llm, schema_of(PERSON))
    [answer] = ask(llm, schema_of(PERSON), stop="age")

    assert answer.text == whole.text[: whole.text.index("age")]
    assert answer.finish_reason == "stop"


def test_an_answer_that_is_too_long_ends_as_any_other(llm: LLM) -> None:
    [whole] = ask(llm, schema_of(PERSON))
    [answer] = ask(llm, schema_of(PERSON), max_tokens=5)

    assert answer.token_ids == whole.token_ids[:5]
    assert answer.finish_reason == "length"


def test_every_schedule_gives_the_same_answers(folder: Path) -> None:
    texts = []
    for schedule in ("sync", "async-1", "async-3"):
        with open_llm(folder, schedule=schedule) as llm:
            texts.append([one.text for one in ask(llm, schema_of(PERSON), n=4, temperature=1.0, seed=11)])

    assert texts[0] == texts[1] == texts[2]


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_without_an_end_of_text_ends_with_its_grammar(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", with_tokenizer=False, eos_token_id=None)
    tokenizer = make_tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with open_llm(tmp_path) as llm:
        [answer] = ask(llm, schema_of(PERSON))
        [endless] = ask(llm, Grammar("regex", "a+"), max_tokens=9)

    check(answer, PERSON)
    assert (endless.text, endless.finish_reason) == ("a" * 9, "length")


def test_a_model_without_a_tokenizer_refuses_a_grammar(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", with_tokenizer=False)
    with open_llm(tmp_path) as llm:
        [output] = llm.generate(PROMPT, params(JSON_OBJECT), progress=False)

    assert output.error == "a grammar needs a tokenizer, and this model has none"


def test_a_vocabulary_of_fewer_logits_than_tokens_is_followed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", vocab_size=261)
    with open_llm(tmp_path) as llm:
        [answer] = ask(llm, schema_of(PERSON))

    check(answer, PERSON)


# --- beside others ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_requests_beside_it_get_what_they_get_alone(folder: Path, schedule: str) -> None:
    free = [params(None, max_tokens=40, ignore_eos=True), params(None, max_tokens=33, temperature=1.0, seed=9)]
    prompts = [PROMPT, [7, *PROMPT], PROMPT, [9, *PROMPT]]
    bound = [params(schema_of(PERSON)), params(Grammar("regex", "[ab]{30}"), temperature=1.0, seed=2, logprobs=1)]
    with open_llm(folder, schedule=schedule) as llm:
        alone = [
            llm.generate(prompt, one, progress=False)[0].outputs[0].token_ids
            for prompt, one in zip(prompts, [*free, *bound], strict=True)
        ]
        together = llm.generate(prompts, [*free, *bound], progress=False)

    assert [output.outputs[0].token_ids for output in together] == alone


def test_preempted_answers_go_on_where_they_were(folder: Path) -> None:
    """So few blocks that requests have to give way."""
    grammar = Grammar("regex", "[a-z]{60}")
    prompts = [[number, *PROMPT] for number in range(1, 7)]
    with open_llm(folder) as roomy:
        expected = [one.outputs[0].text for one in roomy.generate(prompts, params(grammar), progress=False)]
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_space=80 << 10) as narrow:
        found = narrow.generate(prompts, params(grammar), progress=False)
        num_preemptions = narrow.engine.scheduler.num_preemptions

    assert num_preemptions > 0
    assert [one.outputs[0].text for one in found] == expected


class _FailsOnce:
    """A runner that fails at its `number`-th step."""

    def __init__(self, llm: LLM, number: int) -> None:
        self._runner = llm.engine.runner
        self._left = number

    def submit(self, step: Step, constrain: object = None) -> object:
        self._left -= 1
        if not self._left:
            raise RuntimeError("once")
        return self._runner.submit(step, constrain)

    def forget(self, request: object) -> None:
        self._runner.forget(request)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["sync", "async-2"])
@pytest.mark.parametrize("number", [2, 13])
def test_after_a_failed_step_answers_go_on_where_they_were(folder: Path, schedule: str, number: int) -> None:
    prompts = [PROMPT, [5, *PROMPT]]
    with open_llm(folder, schedule=schedule) as llm:
        expected = [one.outputs[0].text for one in llm.generate(prompts, params(schema_of(PERSON)), progress=False)]
        llm.engine.runner = _FailsOnce(llm, number)
        found = llm.generate(prompts, params(schema_of(PERSON)), progress=False)

    assert [one.outputs[0].text for one in found] == expected
    assert {one.outputs[0].finish_reason for one in found} == {"stop"}


@pytest.mark.parametrize("number", [3, 9])
def test_what_was_given_out_beside_a_sampling_that_fails_arrives_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A step's tokens are given to their requests while the masks of the next one are made."""
    sample = Sampler.sample
    left = [number]

    def failing(*arguments: Any) -> SampledTokens:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("once")
        return sample(*arguments)

    grammars = {"short": Grammar("regex", f"[a-z]{{{number - 2}}}"), "long": Grammar("regex", "[a-z]{30}")}
    told: dict[str, list[StreamPiece]] = {name: [] for name in grammars}
    monkeypatch.setattr(Sampler, "sample", failing)
    with open_llm(folder, schedule="async-1") as llm:
        for name, grammar in grammars.items():
            llm.engine.add(name, PROMPT, params(grammar))
        while llm.engine.has_requests:
            for request, piece in llm.engine.step():
                told[request.id].append(piece)

    assert left[0] < 0
    for name, pieces in told.items():
        answer = pieces[-1].completion
        assert answer is not None, name
        assert answer.finish_reason == "stop", name
        assert re.fullmatch(grammars[name].text, answer.text), name
        assert "".join(piece.text for piece in pieces) == answer.text
        assert [token_id for piece in pieces for token_id in piece.token_ids] == answer.token_ids


def test_a_matcher_that_fails_ends_its_own_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Constraints.advance

    def stumbling(self: Constraints, sampled: list[tuple[object, int]]) -> None:
        """The fifth token of a bad request is taken for one that the grammar has not."""
        advance(
            self,
            [
                (request, 0 if request.group == "bad" and request.num_outputs >= 4 else token_id)
                for request, token_id in sampled
            ],
        )

    monkeypatch.setattr(Constraints, "advance", stumbling)
    with open_llm(folder) as llm, EngineClient(llm.engine) as client:
        grammar = Grammar("regex", "[a-z]{30}")
        good = client.submit(PROMPT, params(grammar), request_id="good")
        bad = client.submit(PROMPT, params(grammar), request_id="bad")
        [failed], [answer] = bad.wait(), good.wait()

    assert failed.finish_reason == "error"
    assert len(failed.token_ids) < 30
    assert (len(answer.text), answer.finish_reason) == (30, "stop")


def test_requests_without_a_grammar_ask_for_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither alone nor, for their own tokens, beside others."""
    asked: list[str] = []
    for name in ("advance", "masks", "end_of", "waits_for_tokens"):
        act = getattr(Constraints, name)

        def noting(self: Constraints, *rest: Any, name: str = name, act: Callable[..., Any] = act, **named: Any) -> Any:
            asked.append(name)
            return act(self, *rest, **named)

        monkeypatch.setattr(Constraints, name, noting)

    free = ask(llm, None, max_tokens=9, ignore_eos=True)
    assert asked == []
    both = [params(None, max_tokens=9, ignore_eos=True), params(Grammar("regex", "[ab]{4}"))]
    beside, bound = llm.generate([PROMPT, PROMPT], both, progress=False)

    assert beside.outputs[0].token_ids == free[0].token_ids
    assert re.fullmatch("[ab]{4}", bound.outputs[0].text)
    assert asked.count("end_of") == 4


def test_an_aborted_answer_leaves_nothing_behind(folder: Path) -> None:
    with open_llm(folder) as llm, EngineClient(llm.engine) as client:
        endless = client.submit(PROMPT, params(Grammar("regex", "a+"), max_tokens=400, ignore_eos=True))
        next(iter(endless))
        endless.abort()
        [aborted] = endless.wait()
        [answer] = client.submit(PROMPT, params(schema_of(PERSON))).wait()
        is_clear = not llm.engine._constraints

    assert aborted.finish_reason == "abort"
    check(answer, PERSON)
    assert is_clear


@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_an_answer_that_its_grammar_does_not_let_continue_ends_alone(
    folder: Path, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    grammar = Grammar("lark", 'start: /[ab]{3}/ x\nx: x "c"')
    with open_llm(folder, schedule=schedule) as llm, EngineClient(llm.engine) as client:
        bad = client.submit(PROMPT, params(grammar), request_id="bad")
        good = client.submit(PROMPT, params(Grammar("regex", "[a-z]{30}")), request_id="good")
        [failed], [answer] = bad.wait(), good.wait()

    assert (failed.finish_reason, len(failed.text)) == ("dead_end", 3)
    assert (len(answer.text), answer.finish_reason) == (30, "stop")
    assert f"request bad cannot be answered: {DEAD_END}" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_grammar_that_cannot_work_is_refused_before_the_engine_sees_it(folder: Path) -> None:
    with open_llm(folder) as llm, EngineClient(llm.engine) as client:
        stream = client.submit(PROMPT, params(Grammar("regex", "(a")))

        with pytest.raises(InvalidParameter, match=r"the grammar cannot be compiled: .*unclosed group"):
            stream.wait()
