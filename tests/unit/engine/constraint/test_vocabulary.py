"""The tokens of a model as grammars see them."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLExecutor
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.structured.vocabulary import make_tokenizer
from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.constraint.mask_thread import MaskThread
from kvtier.engine.constraint.vocabulary import make_vocabulary
from kvtier.engine.grammar import Grammar
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import VOCAB_SIZE, make_tiny_tokenizer
from tests.support.waiting import LIMIT_S

END, ROLE = 256, 257
BLANK = "▁"
_LARGE = 1500


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


@pytest.fixture
def marked(tmp_path: Path) -> Tokenizer:
    """As SentencePiece has it: blanks are marked, and a text begins with one. There are tokens of bytes, too."""
    words = ["<unk>", "</s>", "<0x0A>", BLANK, "a", "b", "ab", f"{BLANK}ab", '"', f'{BLANK}"', "{", "}", ":", "1"]
    merges = [("a", "b"), (BLANK, "ab"), (BLANK, '"')]
    inner = Inner(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


def test_special_tokens_are_no_text(tiny: Tokenizer) -> None:
    vocabulary = make_vocabulary(tiny, VOCAB_SIZE, [END])

    assert tiny.special_token_ids == {END, ROLE}
    assert vocabulary.vocab_size == VOCAB_SIZE
    assert vocabulary.eos_tokens == [END]
    assert [token for token in range(255) if vocabulary.is_special_token(token)] == []
    assert vocabulary.is_special_token(END)
    assert vocabulary.is_special_token(ROLE)


def test_ids_without_a_token_are_never_allowed(tiny: Tokenizer) -> None:
    compiled = GrammarCompiler(tiny, VOCAB_SIZE, [END]).compile(Grammar("regex", "(?s).{1,9}"))

    allowed = int.from_bytes(compiled.take_copy().matcher().compute_bitmask(), "little")

    assert allowed >> ord("a") & 1
    assert not allowed >> 266, "the tokenizer has 266 tokens"
    assert not allowed >> ROLE & 1


def test_every_end_of_text_ends_an_answer(tiny: Tokenizer) -> None:
    compiled = GrammarCompiler(tiny, VOCAB_SIZE, [END, ROLE, VOCAB_SIZE + 5]).compile(Grammar("regex", "a*"))

    allowed = int.from_bytes(compiled.take_copy().matcher().compute_bitmask(), "little")

    assert [token for token in range(VOCAB_SIZE) if allowed >> token & 1] == [ord("a"), END, ROLE]


def test_forced_text_is_spelled_without_the_blank_that_a_tokenizer_adds(marked: Tokenizer) -> None:
    compiled = GrammarCompiler(marked, 16, [1]).compile(Grammar("lark", 'start: "ab" "ab"'))
    matcher = compiled.take_copy().matcher()
    text = b""
    while not matcher.is_stopped():
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        token = next(token for token in range(16) if allowed >> token & 1)
        text += marked.token_bytes(token)
        assert matcher.consume_token(token)

    assert text == b"abab"


class _Counting(Tokenizer):
    """Counts the texts that it encodes."""

    def __init__(self, folder: Path) -> None:
        self.texts: list[str] = []
        super().__init__(folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_text_that_a_grammar_forces_is_tokenized_once(marked: Tokenizer, tmp_path: Path) -> None:
    """However many answers it is forced upon; a long one each time, since it would take room."""
    tokenizer = _Counting(tmp_path)
    compiled = GrammarCompiler(tokenizer, 16, [1]).compile(Grammar("regex", f"(abab|{'b' * 160})"))
    tokenizer.texts = []

    for first in (b"a", b"b"):
        for _ in range(3):
            matcher = compiled.take_copy().matcher()
            assert matcher.consume_token(next(token for token in range(16) if tokenizer.token_bytes(token) == first))
            matcher.compute_bitmask()

    counts = Counter(tokenizer.texts)
    assert counts["bab"] == 1
    assert {count for text, count in counts.items() if len(text) < 10} == {1}
    assert {count for text, count in counts.items() if len(text) > 128} == {3}


def test_byte_level_tokenizers_are_not_asked_while_masks_are_made(tmp_path: Path) -> None:
    """Threads that make masks would wait for Python's lock."""
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = _Counting(tmp_path)
    compiled = GrammarCompiler(tokenizer, VOCAB_SIZE, [END]).compile(Grammar("regex", "(hello|there)"))
    tokenizer.texts = []
    matcher = compiled.take_copy().matcher()

    assert matcher.consume_token(ord("t"))
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")

    assert allowed == 1 << ord("h"), "the text is forced"
    assert tokenizer.texts == []


_OBJECT = {
    "type": "object",
    "properties": {"name é": {"type": "string", "maxLength": 12}, "kinds": {"enum": ["a", "it's <|end|>", "b"]}},
    "required": ["name é", "kinds"],
}
_COMPOSING = {"type": "object", "properties": {"e\u0301t\u00e9": {"const": "e\u0301"}}, "required": ["e\u0301t\u00e9"]}
"""The same character, composed and not: a tokenizer that composes them would spell a name differently."""


def _large(folder: Path, *, composes: bool) -> Tokenizer:
    made = make_tokenizer(_LARGE)
    if composes:
        made.backend_tokenizer.normalizer = normalizers.NFC()
    made.save_pretrained(folder)
    return Tokenizer(folder)


@pytest.mark.parametrize("schema", [_OBJECT, _COMPOSING])
@pytest.mark.parametrize("composes", [False, True])
def test_masks_are_the_same_whoever_tokenizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composes: bool, schema: dict[str, object]
) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    tokenizer = _large(tmp_path, composes=composes)
    own = GrammarCompiler(tokenizer, _LARGE + 70, [_LARGE - 1]).compile(grammar)
    monkeypatch.setattr(Tokenizer, "byte_level_document", None)
    asked = GrammarCompiler(tokenizer, _LARGE + 70, [_LARGE - 1]).compile(grammar)
    dice = random.Random(1)
    for _ in range(5):
        first, second = own.take_copy().matcher(), asked.take_copy().matcher()
        text = b""
        while not first.is_stopped():
            masks = [int.from_bytes(matcher.compute_bitmask(), "little") for matcher in (first, second)]
            if not (composes and schema is _COMPOSING):  # then the other way takes the longest token first
                assert masks[0] == masks[1]
            token = dice.choice([token for token in range(_LARGE - 1) if masks[0] >> token & 1] or [_LARGE - 1])
            text += b"" if token == _LARGE - 1 else tokenizer.token_bytes(token)
            assert first.consume_token(token), first.get_error()
            assert second.consume_token(token), second.get_error()
        assert set(schema["required"]) <= set(json.loads(text))  # type: ignore[call-overload]


def test_a_tokenizer_that_changes_texts_is_asked(tmp_path: Path) -> None:
    made = make_tokenizer(_LARGE)
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    made.save_pretrained(tmp_path)

    assert Tokenizer(tmp_path).byte_level_document is None


def test_masks_need_no_lock_of_pythons(tmp_path: Path) -> None:
    """This thread keeps Python's lock until all masks are written, also those of forced texts."""
    tokenizer = _large(tmp_path, composes=False)
    compiled = GrammarCompiler(tokenizer, _LARGE, [_LARGE - 1]).compile(Grammar("regex", "(hello|there)"))
    matchers = [compiled.take_copy().matcher() for _ in range(6)]
    for matcher in matchers:
        assert matcher.consume_tokens(tokenizer.encode("t"))
    words = np.zeros((len(matchers), compiled.num_words), np.int32)
    pairs = [(matcher, place) for place, matcher in enumerate(matchers)]
    executor = LLExecutor(2)
    thread = MaskThread()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10 * LIMIT_S)
    try:
        thread.begin(lambda: executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, 4 * words.shape[1], len(words)))
        until = time.monotonic() + LIMIT_S
        while not words.any(axis=1).all() and time.monotonic() < until:
            pass
        are_made = bool(words.any(axis=1).all())
    finally:
        sys.setswitchinterval(interval)
        thread.wait()
        thread.close()

    assert are_made
