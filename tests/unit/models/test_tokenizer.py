"""Text to token ids and back, at once and as it grows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from kvtier.errors import ConfigError, InvalidParameter
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import make_tiny_tokenizer

TEXTS = [
    "the other thin one",
    "naïve café, Straße",
    "你好，世界",
    "👩‍👩‍👧 and 🇩🇪 and 🏳️‍🌈!",
    " leading and trailing ",
    "tab\tnewline\n\nand \u00a0 spaces",
    "ends in half \ufffd",
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


@pytest.fixture
def spaced_tokenizer(tmp_path: Path) -> Tokenizer:
    """As sentencepiece writes them: words start with a mark that is a space except at the start of a text, and
    characters that are no token are spelled in bytes."""
    words = ["<unk>", "▁hello", "▁world", "▁the", "!", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    inner = FastTokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_whole_characters_and_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()

    pieces = [stream.push([token_id]) for token_id in tokenizer.encode(text)]
    rest = stream.finish()

    assert "".join(pieces) + rest == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_is_held_until_its_last_byte(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()

    assert [stream.push([byte]) for byte in "a你b".encode()] == ["a", "", "", "你", "b"]


def test_what_was_held_comes_at_the_end_as_broken_as_it_is(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()

    assert stream.push("ok 你".encode()[:-1]) == "ok "
    assert stream.finish() == "\ufffd"
    assert stream.push(b"new") == "new"


def test_bytes_that_are_no_text_are_not_held_for_ever(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()

    pieces = [stream.push([0xFF]) for _ in range(100)]

    assert sum(map(len, pieces)) >= 80
    assert len("".join(pieces) + stream.finish()) == 100


def test_the_pieces_are_the_text_for_any_split(tokenizer: Tokenizer) -> None:
    chance = random.Random(3)
    for _ in range(50):
        text = "".join(chance.choice(["a", " ", "ß", "你", "👩", "\u200d", "the"]) for _ in range(30))
        token_ids = tokenizer.encode(text)
        stream, out = tokenizer.stream(), ""
        while token_ids:
            count = chance.randint(1, 5)
            out += stream.push(token_ids[:count])
            token_ids = token_ids[count:]
        assert out + stream.finish() == text


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("hi"), 256, *tokenizer.encode("ho")]

    assert tokenizer.stream().push(token_ids) == "hiho"
    assert tokenizer.stream(skip_special_tokens=False).push(token_ids) == "hi<|end|>ho"
    assert tokenizer.eos_token_ids == (256,)


def test_a_run_of_special_tokens_costs_no_memory(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()

    assert stream.push([256] * 200) == ""
    assert stream.push(b"on") == "on"
    assert len(stream._window) < 40


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        ([1, 2, 2, 4], "hello world world!"),
        ([3, *(5 + byte for byte in "你好".encode()), 2], "the你好 world"),
        ([*(5 + byte for byte in "👩".encode()), 261, 261, 1], "👩   hello"),
    ],
)
def test_a_stream_keeps_the_spaces_of_sentencepiece(
    spaced_tokenizer: Tokenizer, token_ids: list[int], text: str
) -> None:
    stream = spaced_tokenizer.stream()

    pieces = [stream.push([token_id]) for token_id in token_ids]

    assert spaced_tokenizer.decode(token_ids) == text
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_conversation_becomes_a_prompt(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hé"}]

    text = tokenizer.render_chat(messages)

    assert text == "<|role|>user\nhé<|end|><|role|>assistant\n"
    assert tokenizer.apply_chat_template(messages)[0] == 257
    assert tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special_tokens=False) == text
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|role|>user\nhé<|end|>"


def test_messages_that_the_template_cannot_take_are_refused(tokenizer: Tokenizer) -> None:
    tokenizer._inner.chat_template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(InvalidParameter, match="the chat template does not take these messages: roles must alternate"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_without_a_template_messages_are_refused(spaced_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="has no chat template: give a prompt rather than messages"):
        spaced_tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


def test_a_folder_without_a_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tmp_path)

    assert tokenizer.is_absent
    assert tokenizer.eos_token_ids == ()
    with pytest.raises(InvalidParameter, match="has no tokenizer: give token ids rather than text"):
        tokenizer.encode("text")
    with pytest.raises(InvalidParameter, match="has no tokenizer: give token ids rather than text"):
        tokenizer.stream()


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be loaded: "):
        Tokenizer(tmp_path)
