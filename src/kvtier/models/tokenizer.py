"""Text to token ids and back, with the tokenizer and the chat template of a model folder.

A folder may have no tokenizer: its model then serves token ids, and text is refused. Importing this module imports
transformers; code that handles only token ids does not need it. One thread at a time uses a `TextStream`; any number of
threads share a `Tokenizer`.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvtier.errors import ConfigError, InvalidParameter
from kvtier.models.foreign_files import refuse_lfs_pointer
from kvtier.observe.printable import printable

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_NOT_FOR_TEMPLATES = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "tokenizer_kwargs", "kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
_NEUTRAL_VALUES = {"add_generation_prompt": True, "continue_final_message": False}
"""The defaults of these arguments, which clients may send."""
_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
_PROMPT_TOKENS = 8
"""Tokens of a prompt's end to decode with what follows it: some may be special tokens, which have no text."""
_SPACE_MARK = "▁"
_DATE_FUNCTION = "strftime_now"
"""The name of transformers' function that tells templates the time."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one model folder, or its absence: then text is refused with `InvalidParameter`."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Raises `ConfigError` if there are tokenizer files that cannot be used."""
        self._inner: Any = None
        self._decode: Callable[..., str] | None = None
        """Without what transformers wraps around it, where that would change nothing."""
        self._token_bytes: dict[int, bytes] = {}
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return
        for path in (*sorted(folder.glob("*token*")), folder / "vocab.json", folder / "merges.txt"):
            refuse_lfs_pointer(path)
        try:
            self._inner = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
            self._inner.model_max_length = sys.maxsize  # the engine decides how long a prompt may be
            # The first use turns a stored truncation off, which must not happen while another thread encodes.
            self._inner.encode("")
            if _is_plain(type(self._inner)):
                self._decode = self._inner.backend_tokenizer.decode
        except Exception as error:  # its parsers may raise anything
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {printable(reason)}") from error

    @property
    def is_absent(self) -> bool:
        return self._inner is None

    @property
    def has_chat_template(self) -> bool:
        return not self.is_absent and bool(self._inner.chat_template)

    @property
    def chat_template(self) -> str:
        """The template in the model's folder, of several the default one; empty if there is none."""
        template = None if self.is_absent else self._inner.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        return template or ""

    @property
    def tool_template(self) -> str:
        """The template for conversations with tools; empty if it is the same one."""
        template = None if self.is_absent else self._inner.chat_template
        return str(template.get("tool_use") or "") if isinstance(template, Mapping) else ""

    @property
    def stamps_date(self) -> bool:
        """Whether the chat template may write the current date: prompts then diverge when it changes."""
        return _DATE_FUNCTION in self._words_of_template

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end of text, if it has one; a model config may have more."""
        if self.is_absent or self._inner.eos_token_id is None:
            return ()
        return (self._inner.eos_token_id,)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are not text: ends, roles and the like."""
        return (
            frozenset() if self.is_absent else frozenset(self._inner.all_special_ids) | {*self.special_tokens.values()}
        )

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of tokens that `decode` leaves out, by their texts."""
        if self.is_absent:
            return {}
        left_out = set(self._inner.all_special_ids)
        return {
            text: token_id
            for token_id, text in self._added_tokens.items()
            if token_id in left_out or self._inner.added_tokens_decoder[token_id].special
        }

    @property
    def byte_level_document(self) -> str | None:
        """The tokenizer in the form of `tokenizer.json`, for texts that it must spell exactly: it normalizes nothing.

        None if it is not byte-level, does more than its document says, or normalizes otherwise than by composing
        characters.
        """
        if self.is_absent or not _is_plain(type(self._inner)):
            return None
        document = json.loads(self._inner.backend_tokenizer.to_str())
        decoder, normalizer = document.get("decoder") or {}, document.get("normalizer") or {}
        if decoder.get("type") != "ByteLevel" or normalizer.get("type", "NFC") != "NFC":
            return None
        return json.dumps({**document, "normalizer": None})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; by default with the special tokens that some models start with."""
        return list(self._present().encode(text, add_special_tokens=add_special_tokens))

    def encode_behind(self, text: str) -> list[int]:
        """Like `encode` for text that follows another: without the space that some tokenizers put before every text."""
        if self._marks_spaces:
            line, behind = (self.encode(one, add_special_tokens=False) for one in ("\n", f"\n{text}"))
            if behind[: len(line)] == line:
                return behind[len(line) :]
        return self.encode(text, add_special_tokens=False)

    @property
    def first_token_ids(self) -> list[int]:
        """The token with which the tokenizer begins every text, if there is one."""
        first = self._present().bos_token_id
        return [first] if first is not None and self.encode("")[:1] == [first] else []

    def added_token_id(self, text: str) -> int | None:
        """The id of a token that was added to the vocabulary, and stands for its own text; None if there is none."""
        return self._ids_of_added_tokens.get(text)

    def vocabulary_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as in the vocabulary; empty for an invalid id."""
        tokens = self._present().convert_ids_to_tokens(list(token_ids))
        return [token.decode(errors="replace") if isinstance(token, bytes) else token or "" for token in tokens]

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]] | None:
        """Token ids of `text` alone, and where in it each begins; None if the tokenizer does not support that."""
        inner = self._present()
        if not inner.is_fast:
            return None
        found = inner(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), [start for start, _ in found["offset_mapping"]]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._decode is not None:
            return self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        return str(
            self._present().decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character; none for an invalid id.

        For a special token, the bytes of its text. The bytes of all tokens of a text are those of the text, apart from
        a space that some tokenizers begin every text with.
        """
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._bytes_of(token_id)
            if known:
                self._token_bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token; a part of a character is shown as a replacement character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer; `template_values` are further names for the template."""
        text = self.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_values=template_values
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_values: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as text, written by the model's chat template, which gets the values that it names.

        Raises `InvalidParameter` if it does not accept these messages, or if one of `template_values` is not for it.
        """
        inner = self._present()
        if not self.has_chat_template:
            raise InvalidParameter("the model has no chat template: give a prompt rather than messages")
        values: dict[str, Any] = {}
        for name, value in (template_values or {}).items():
            if name in _NEUTRAL_VALUES and value is _NEUTRAL_VALUES[name]:
                continue
            if name in _NOT_FOR_TEMPLATES:  # it would reach the library's own parameters, such as another template
                raise InvalidParameter(f"{name!r} is not for the model's chat template")
            if name in self._words_of_template:
                values[name] = value
        try:
            text = inner.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **values,
            )
        except Exception as error:  # a template is a program
            raise InvalidParameter(f"the chat template does not take these messages: {error}") from error
        return str(text)

    def stream(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> TextStream:
        """A decoder for one answer as it grows, behind `prompt`."""
        self._present()
        return TextStream(self, skip_special_tokens=skip_special_tokens, prompt=prompt)

    def _bytes_of(self, token_id: int) -> bytes:
        if self.is_absent:
            return b""
        added = self._added_tokens.get(token_id)
        if added is not None:
            return added.encode()
        try:
            token = self._inner.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, OverflowError):
            token = None
        if token is None or isinstance(token, bytes):
            return token or b""
        alphabet = _byte_alphabet()
        if self._is_byte_level and all(character in alphabet for character in token):
            return bytes(map(alphabet.__getitem__, token))
        spelled = _BYTE_TOKEN.fullmatch(token)
        if spelled is not None and self._spells_bytes:
            return bytes.fromhex(spelled[1])
        text: str = token.replace(_SPACE_MARK, " ") if self._marks_spaces else token
        return text.encode()

    @functools.cached_property
    def _added_tokens(self) -> dict[int, str]:
        """Added tokens, which stand for their own text in tokenizers of every kind."""
        return {token_id: str(token) for token_id, token in self._inner.added_tokens_decoder.items()}

    @functools.cached_property
    def _ids_of_added_tokens(self) -> dict[str, int]:
        return {text: token_id for token_id, text in self._added_tokens.items()}

    @functools.cached_property
    def _words_of_template(self) -> frozenset[str]:
        """Words of the templates, to look up clients' names: these are never searched for in a template."""
        return frozenset(re.findall(r"\w+", f"{self.chat_template} {self.tool_template}"))

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return self._joined("x", "Ġ") == "x "

    @functools.cached_property
    def _spells_bytes(self) -> bool:
        return self._joined("x", "<0x41>") == "xA"

    @functools.cached_property
    def _marks_spaces(self) -> bool:
        return self._joined("x", _SPACE_MARK, "x") == "x x"

    def _joined(self, *tokens: str) -> str:
        """The output of the tokenizer's decoder: the only way to find out how it writes bytes and spaces."""
        try:
            return str(self._inner.convert_tokens_to_string(list(tokens)))
        except (KeyError, TypeError, ValueError, UnicodeError):  # it has its own code, and no such token
            return ""

    def _present(self) -> Any:
        if self._inner is None:
            raise InvalidParameter("the model has no tokenizer: give token ids rather than text")
        return self._inner


class TextStream:
    """Token ids in, text out: the joined pieces are the text of all ids, and no piece ends inside a character.

    Decodes a short window that ends with the newest token. Its start lies a piece back, because tokenizers treat the
    first token of a text differently (some drop its leading space): an answer's first token follows its prompt's last.

    Special tokens with a text in `kept` stay in the text even if others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        kept: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        ids = tokenizer.special_tokens if skip_special_tokens and kept else {}
        self._kept = {ids[text]: text for text in kept if text in ids}
        self._window = list(prompt[-_PROMPT_TOKENS:])
        self._num_context = 0  # tokens at the window's start whose text was returned already
        self._num_out = 0  # characters of the window's text that were returned already
        for end in range(len(self._window), 0, -1):  # a prompt may end inside a character: its tokens come out again
            text = self._decode(self._window[:end])
            if not text.endswith(_REPLACEMENT):
                self._num_context, self._num_out = end, len(text)
                break

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; a possible half character waits for more."""
        pieces = [self._push(token_id) for token_id in token_ids]
        return "".join(pieces)

    def finish(self) -> str:
        """The text still waiting, now that there are no more tokens; the stream starts again."""
        text = self._decode(self._window)[self._num_out :]
        self._window, self._num_context, self._num_out = [], 0, 0
        return text

    def _push(self, token_id: int) -> str:
        if token_id in self._kept:
            return self._flush() + self._kept[token_id]
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        # A character has at most four bytes: text broken for longer is not the start of one.
        is_old = len(self._window) - self._num_context > _MAX_HELD_TOKENS
        is_held = whole != text and not is_old
        piece = (whole if is_held else text)[self._num_out :]
        if is_held:
            self._num_out += len(piece)
        elif piece or is_old:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_out = len(self._decode(self._window))
        return piece

    def _flush(self) -> str:
        """The text still waiting, now that a token of another kind follows; the window stays as its context."""
        text = self._decode(self._window)
        piece = text[self._num_out :]
        self._num_context, self._num_out = len(self._window), len(text)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _is_plain(kind: type) -> bool:
    """Whether it decodes as its library's own class for tokenizers in Rust does."""
    own = PreTrainedTokenizerFast
    return issubclass(kind, own) and kind.decode is own.decode and kind._decode is own._decode


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The byte for each printable character that byte-level BPE uses in its place."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
