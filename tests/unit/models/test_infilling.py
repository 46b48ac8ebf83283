"""Prompts for what stands between two texts, by the tokens that a tokenizer has for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtier.errors import InvalidParameter
from kvtier.models.infilling import infill_form
from kvtier.models.prompt_encoder import PromptEncoder
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import make_tiny_tokenizer

FORMS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
]


def with_tokens(folder: Path, *tokens: str) -> Tokenizer:
    inner = make_tiny_tokenizer()
    inner.add_tokens(list(tokens), special_tokens=True)
    inner.save_pretrained(folder)
    return Tokenizer(folder)


@pytest.mark.parametrize("form", FORMS)
def test_prefix_and_suffix_stand_between_the_models_own_tokens(tmp_path: Path, form: tuple[str, str, str]) -> None:
    tokenizer = with_tokens(tmp_path, *form)
    before, between, behind = (tokenizer.added_token_id(one) for one in form)

    infill = PromptEncoder(tokenizer, 100, 1000).encode_infill("the", " hen")

    assert infill.token_ids == [before, *tokenizer.encode("the"), between, *tokenizer.encode(" hen"), behind]
    assert set(infill.stop_token_ids) >= {before, between, behind}


def test_the_end_of_a_middle_ends_the_answer(tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, *FORMS[-1], "▁<EOT>")

    infill = PromptEncoder(tokenizer, 100, 1000).encode_infill("a", "b")

    assert tokenizer.added_token_id("▁<EOT>") in infill.stop_token_ids


def test_a_model_without_all_three_tokens_is_not_asked_to_fill_in(tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, "<|fim_prefix|>", "<|fim_suffix|>")

    assert infill_form(tokenizer) is None
    with pytest.raises(InvalidParameter, match="suffix needs a model with fill-in tokens, and this one has none"):
        PromptEncoder(tokenizer, 100, 1000).encode_infill("a", "b")
    with pytest.raises(InvalidParameter, match="suffix needs a model with a tokenizer"):
        PromptEncoder(None, 100, 1000).encode_infill("a", "b")


def test_a_suffix_gets_no_space_of_its_own_where_every_text_begins_with_one(tmp_path: Path) -> None:
    pieces = ["<s>", "▁", "\n", *"abcdefg"]
    inner = InnerTokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")  # type: ignore[no-untyped-call]
    fast.add_tokens(list(FORMS[-1]), special_tokens=True)
    fast.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)

    assert tokenizer.encode("ab", add_special_tokens=False) == [1, 3, 4]
    assert tokenizer.encode_behind("ab") == [3, 4]
    assert tokenizer.encode_behind(" ab") == [1, 3, 4]


def test_half_a_character_in_a_suffix_is_refused(tmp_path: Path) -> None:
    encoder = PromptEncoder(with_tokens(tmp_path, *FORMS[0]), 100, 1000)

    with pytest.raises(InvalidParameter, match="not valid text"):
        encoder.encode_infill("a", "\ud800")


def test_tokens_have_their_text_and_their_names_in_the_vocabulary(tmp_path: Path) -> None:
    encoder = PromptEncoder(with_tokens(tmp_path), 100, 320)
    token_ids = encoder.encode("the hen")

    assert encoder.decode(token_ids) == "the hen"
    assert encoder.decode([256, *token_ids]) == "<|end|>the hen"
    assert encoder.decode([256, *token_ids], skip_special_tokens=True) == "the hen"
    assert encoder.token_texts(token_ids) == ["the", "Ġ", "he", "n"]
    with pytest.raises(InvalidParameter, match="the token id 320 is not in the vocabulary of 320"):
        encoder.decode([320])
    with pytest.raises(InvalidParameter, match="the model has no tokenizer: its tokens have no text"):
        PromptEncoder(None, 100, 320).decode([1])
