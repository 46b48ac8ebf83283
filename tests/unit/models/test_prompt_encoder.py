"""Prompts of text and chats as token ids, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import InvalidParameter, PromptTooLong
from kvtier.models.prompt_encoder import PromptEncoder
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import make_tiny_tokenizer

CHAT = [{"role": "user", "content": "hé"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


def test_a_chat_is_what_its_template_writes_without_further_special_tokens(tokenizer: Tokenizer) -> None:
    assert PromptEncoder(tokenizer, 100, 1000).encode_chat(CHAT, {}).token_ids == tokenizer.apply_chat_template(CHAT)


def test_a_value_that_the_template_does_not_name_changes_nothing(tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer, 100, 1000)
    assert encoder.encode_chat(CHAT, {"colour": "red"}) == encoder.encode_chat(CHAT, {})


def test_a_value_that_is_the_librarys_own_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="'chat_template' is not for the model's chat template"):
        PromptEncoder(tokenizer, 100, 1000).encode_chat(CHAT, {"chat_template": "red"})


def test_a_chat_that_is_far_too_long_is_refused_by_its_beginning(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptTooLong, match="but at most 99 leave room for an answer"):
        PromptEncoder(tokenizer, 100, 1000).encode_chat([{"role": "user", "content": "no end " * 100_000}], {})


def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="not valid text: surrogates not allowed at character 2"):
        PromptEncoder(tokenizer, 100, 1000).encode("hi\ud800")


@pytest.mark.parametrize("has_folder", [True, False])
def test_without_a_tokenizer_prompts_are_token_ids(tmp_path: Path, has_folder: bool) -> None:
    prompts = PromptEncoder(Tokenizer(tmp_path) if has_folder else None, 100, 1000)

    assert prompts.token_bytes(5) == b""
    with pytest.raises(InvalidParameter, match="has no tokenizer"):
        prompts.encode("text")
    with pytest.raises(InvalidParameter, match="the model has no tokenizer: give a prompt of token ids"):
        prompts.encode_chat(CHAT, {})
