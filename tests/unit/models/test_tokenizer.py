"""Text to token ids and back, at once and as it grows."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from kvtier.errors import ConfigError, InvalidParameter
from kvtier.models.tokenizer import TextStream, Tokenizer
from kvtier.testing.tiny_models import ROLE, make_tiny_tokenizer

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


def test_some_special_tokens_can_be_kept_as_text(tokenizer: Tokenizer) -> None:
    accent = list("é".encode())
    token_ids = [*tokenizer.encode("hi"), 257, *accent, 256, accent[0], 257, *tokenizer.encode(" ho")]
    kept = TextStream(tokenizer, kept=(ROLE, "<|unheard|>"))

    assert "".join(kept.push([token_id]) for token_id in token_ids) == f"hi{ROLE}é\ufffd{ROLE} ho"
    assert TextStream(tokenizer, skip_special_tokens=False, kept=(ROLE,)).push([257, 256]) == f"{ROLE}<|end|>"
    assert tokenizer.special_tokens == {"<|end|>": 256, ROLE: 257}


def test_text_behind_a_kept_token_keeps_its_space(spaced_tokenizer: Tokenizer) -> None:
    [(text, token_id)] = spaced_tokenizer.special_tokens.items()
    stream = TextStream(spaced_tokenizer, kept=(text,))

    assert [stream.push([one]) for one in (1, 2, token_id, 3)] == ["hello", " world", text, " the"]


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


# --- one token --------------------------------------------------------------------------------------------------------


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_tokenizer().save_pretrained(folder)
        return Tokenizer(Path(folder))


@pytest.mark.parametrize(
    "token_ids", [[1, 2, 2, 4], [3, *(5 + byte for byte in "你好".encode()), 2], [1, 4, 261, 261, 261, 2], [3, 261, 3]]
)
def test_an_answer_goes_on_where_its_prompt_ends(spaced_tokenizer: Tokenizer, token_ids: list[int]) -> None:
    """With its spaces, also where a prompt ends inside a character: that one is the answer's."""
    for end in range(1, len(token_ids)):
        texts = (spaced_tokenizer.decode(token_ids[:whole]) for whole in range(end, 0, -1))
        before = next(text for text in texts if not text.endswith("\ufffd"))
        stream = spaced_tokenizer.stream(prompt=token_ids[:end])
        answer = "".join(stream.push([token_id]) for token_id in token_ids[end:])
        assert before + answer == spaced_tokenizer.decode(token_ids)


def test_an_answer_behind_special_tokens_keeps_its_space(spaced_tokenizer: Tokenizer) -> None:
    hello, world = 1, 2
    (end,) = spaced_tokenizer.eos_token_ids
    assert spaced_tokenizer.stream(prompt=[hello, end]).push([world]) == " world"
    assert spaced_tokenizer.stream(prompt=[end]).push([world]) == "world"


@given(st.text(st.characters(codec="utf-8")))
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()

    found = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))

    assert found == text.encode()


@pytest.mark.parametrize("text", [*TEXTS, "Ġ and ▁ and <0x41> and <|end|>"])
def test_marks_of_tokenizers_are_text_when_they_are_in_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    assert sorted(tokenizer.token_bytes(token_id) for token_id in range(256)) == [bytes([byte]) for byte in range(256)]


def test_a_tokens_text_is_its_own_also_when_it_is_special_or_half_a_character(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(token_id) for token_id in (260, 256, "你".encode()[0])] == [
        " the",
        "<|end|>",
        "\ufffd",
    ]
    assert tokenizer.token_bytes(257) == b"<|role|>"


@pytest.mark.parametrize("token_id", [-1, 266, 10**6, 2**32, 2**70])
def test_what_is_no_token_has_no_bytes(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == ""


def test_the_tokens_of_sentencepiece_have_spaces_and_bytes(spaced_tokenizer: Tokenizer) -> None:
    token_ids = [1, 4, 261, *(5 + byte for byte in "你".encode()), 262]

    assert [spaced_tokenizer.token_bytes(token_id) for token_id in token_ids] == [
        b" hello", b"!", b" ", b"\xe4", b"\xbd", b"\xa0", b"</s>",
    ]  # fmt: skip
    assert spaced_tokenizer.token_text(5 + 0xE4) == "\ufffd"
    assert spaced_tokenizer.token_bytes(5 + 0x00) == b"\x00"
    assert spaced_tokenizer.token_bytes(999) == b""


def test_a_token_that_was_added_is_its_own_text(tmp_path: Path) -> None:
    inner = make_tiny_tokenizer()
    inner.add_tokens(["Ġé▁<0x41>"])
    inner.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)

    [token_id] = tokenizer.encode("Ġé▁<0x41>")

    assert tokenizer.token_text(token_id) == "Ġé▁<0x41>"


def test_a_tokenizer_whose_file_truncates_encodes_whole_texts(tmp_path: Path) -> None:
    inner = make_tiny_tokenizer()
    inner.backend_tokenizer.enable_truncation(4)
    inner.save_pretrained(tmp_path)

    assert len(Tokenizer(tmp_path).encode("a" * 100)) == 100


# --- chat -------------------------------------------------------------------------------------------------------------


def test_the_chat_template_can_be_read(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template.startswith("{% for message in messages %}")
    tokenizer._inner.chat_template = {"tool_use": "{{ tools }}", "default": "{{ messages }}"}
    assert tokenizer.chat_template == "{{ messages }}"
    tokenizer._inner.chat_template = {"tool_use": "{{ tools }}"}
    assert tokenizer.chat_template == ""


def test_a_template_of_its_own_for_tools_is_told_and_used(tmp_path: Path) -> None:
    inner = make_tiny_tokenizer()
    inner.chat_template = {"default": "plain", "tool_use": "with {{ tools[0].name }} {{ extra }}"}
    inner.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)

    assert (tokenizer.chat_template, tokenizer.tool_template) == ("plain", "with {{ tools[0].name }} {{ extra }}")
    assert tokenizer.render_chat([{"role": "user", "content": ""}], template_values={"extra": 1}) == "plain"
    assert (
        tokenizer.render_chat([{"role": "user", "content": ""}], tools=[{"name": "f"}], template_values={"extra": 1})
        == "with f 1"
    )


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
    assert spaced_tokenizer.chat_template == ""


def test_a_folder_without_a_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tmp_path)

    assert tokenizer.is_absent
    assert tokenizer.eos_token_ids == ()
    assert (tokenizer.chat_template, tokenizer.token_bytes(5), tokenizer.token_text(5)) == ("", b"", "")
    with pytest.raises(InvalidParameter, match="has no tokenizer: give token ids rather than text"):
        tokenizer.encode("text")
    with pytest.raises(InvalidParameter, match="has no tokenizer: give token ids rather than text"):
        tokenizer.stream()


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be loaded: "):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "add_generation_prompt", "messages", "return_dict", "conversation"],
)
def test_a_value_that_is_not_for_the_template_is_refused(tmp_path: Path, name: str) -> None:
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hi"}]

    with pytest.raises(InvalidParameter, match=rf".{name}. is not for the model's chat template"):
        tokenizer.render_chat(messages, template_values={name: "{{ 1 / 0 }}"})


def test_a_value_that_says_what_is_so_anyway_is_passed_over(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    values = {"add_generation_prompt": True, "continue_final_message": False}

    assert tokenizer.render_chat(messages, template_values=values) == tokenizer.render_chat(messages)
    for name, value in values.items():
        with pytest.raises(InvalidParameter, match="is not for the model's chat template"):
            tokenizer.render_chat(messages, template_values={name: not value})


def test_a_value_that_the_template_names_reaches_it(tmp_path: Path) -> None:
    inner = make_tiny_tokenizer()
    inner.chat_template = "{% if enable_thinking %}think{% else %}answer{% endif %}"
    inner.save_pretrained(tmp_path)

    text = Tokenizer(tmp_path).render_chat(
        [{"role": "user", "content": "hi"}], template_values={"enable_thinking": True}
    )

    assert text == "think"


def test_a_template_that_fails_is_the_messages_fault(tmp_path: Path) -> None:
    inner = make_tiny_tokenizer()
    inner.chat_template = "{{ 1 / (messages | length - 1) }}"
    inner.save_pretrained(tmp_path)

    with pytest.raises(InvalidParameter, match="division by zero"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])
