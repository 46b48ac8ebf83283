"""Text to token ids and back, with the tokenizer and the chat template of a model folder.

A folder may have no tokenizer: its model then serves token ids, and text is refused. Importing this module imports
transformers; who handles token ids only has no need to. One thread at a time uses a `TextStream`; any number of
threads share a `Tokenizer`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvtier.errors import ConfigError, InvalidParameter
from kvtier.observe.printable import printable

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_NOT_FOR_TEMPLATES = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "tokenizer_kwargs", "kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
_PROMPT_TOKENS = 8
"""Of a prompt's end, for the text of what follows it: some of them may be special tokens, which have none."""
_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one model folder, or its absence: then text is refused with `InvalidParameter`."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """Raises `ConfigError` when there are tokenizer files that cannot be used."""
        self._inner: Any = None
        self._token_bytes: dict[int, bytes] = {}
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return
        try:
            self._inner = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
            self._inner.model_max_length = sys.maxsize  # how long a prompt may be is the engine's to say
            # The first use turns a stored truncation off, which must not happen while another thread encodes.
            self._inner.encode("")
        except Exception as error:  # its parsers raise whatever they like
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
        """As the model's folder has it, of several the default one; empty when there is none."""
        template = None if self.is_absent else self._inner.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        return template or ""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end of text, if it names one; a model config may know more of them."""
        if self.is_absent or self._inner.eos_token_id is None:
            return ()
        return (self._inner.eos_token_id,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; the special tokens that some models start with are added unless told otherwise."""
        return list(self._present().encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(
            self._present().decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character; none for an id that is no token.

        Of special tokens their text. The bytes of all tokens of a text are those of the text, but for a space that
        some tokenizers begin every text with.
        """
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._bytes_of(token_id)
            if known:
                self._token_bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token; what is part of a character is shown as broken."""
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
        """The text that the model's chat template makes of a conversation. It is given what it names of the values.

        Raises `InvalidParameter` when it does not take these messages, or one of `template_values` is not for it.
        """
        inner = self._present()
        if not self.has_chat_template:
            raise InvalidParameter("the model has no chat template: give a prompt rather than messages")
        values: dict[str, Any] = {}
        for name, value in (template_values or {}).items():
            if name in _NOT_FOR_TEMPLATES:  # it would reach the library's own parameters: another template, for one
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
        """They stand for their own text, in tokenizers of every kind."""
        return {token_id: str(token) for token_id, token in self._inner.added_tokens_decoder.items()}

    @functools.cached_property
    def _words_of_template(self) -> frozenset[str]:
        """What a client names is looked up here: it is never searched for in the template."""
        return frozenset(re.findall(r"\w+", self.chat_template))

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
        """What the tokenizer's decoder makes of tokens: how it writes bytes and spaces is told by nothing else."""
        try:
            return str(self._inner.convert_tokens_to_string(list(tokens)))
        except (KeyError, TypeError, ValueError, UnicodeError):  # it has its own code, and no such token
            return ""

    def _present(self) -> Any:
        if self._inner is None:
            raise InvalidParameter("the model has no tokenizer: give token ids rather than text")
        return self._inner


class TextStream:
    """Token ids in, text out: the pieces joined are the text of all ids, and no piece ends inside a character.

    Decodes a short window that ends with the newest token. Its start lies a piece back, because tokenizers treat the
    first token of a text differently (some drop its leading space): an answer's first token follows its prompt's last.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt[-_PROMPT_TOKENS:])
        self._num_context = 0  # tokens at the window's start whose text is out already
        self._num_out = 0  # characters of the window's text that are out already
        for end in range(len(self._window), 0, -1):  # a prompt may end inside a character: its tokens come out again
            text = self._decode(self._window[:end])
            if not text.endswith(_REPLACEMENT):
                self._num_context, self._num_out = end, len(text)
                break

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; what may be half a character waits for more."""
        pieces = [self._push(token_id) for token_id in token_ids]
        return "".join(pieces)

    def finish(self) -> str:
        """What was still waiting, now that no more tokens come; the stream starts anew."""
        text = self._decode(self._window)[self._num_out :]
        self._window, self._num_context, self._num_out = [], 0, 0
        return text

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        # A character has at most four bytes: what stays broken for longer is not the start of one.
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

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The byte behind each printable character that byte-level BPE writes for it."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
