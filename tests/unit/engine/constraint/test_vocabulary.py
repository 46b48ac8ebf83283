"""The tokens of a model as grammars see them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtier.engine.constraint.compiler import GrammarCompiler
from kvtier.engine.constraint.vocabulary import make_vocabulary
from kvtier.engine.grammar import Grammar
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import VOCAB_SIZE, make_tiny_tokenizer

END, ROLE = 256, 257
BLANK = "▁"


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

    texts: list[str]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_text_that_a_grammar_forces_is_tokenized_once(tmp_path: Path) -> None:
    """However many answers it is forced upon; a long one each time, since it would take room."""
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = _Counting(tmp_path)
    tokenizer.texts = []
    long = "long" * 40
    compiled = GrammarCompiler(tokenizer, VOCAB_SIZE, [END]).compile(Grammar("regex", f"(hello|{long})"))

    for text in ("hello", long):
        for _ in range(3):
            matcher = compiled.take_copy().matcher()
            assert matcher.consume_tokens(list(text[:2].encode()))
            matcher.compute_bitmask()

    counts = Counter(tokenizer.texts)
    assert {text: count for text, count in counts.items() if len(text) < 10} == {"ello": 1}
    assert {count for text, count in counts.items() if len(text) > 128} == {3}
