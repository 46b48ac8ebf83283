"""Bodies for both APIs that are almost right: valid requests with one or a few things wrong. Seeded, so repeatable.

A body is bytes: what is wrong may be a value, a type, a size, the nesting, or the JSON itself.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Document = dict[str, Any]

OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
OLLAMA_PATHS = ("/api/generate", "/api/chat", "/api/show")

_NUMBERS: list[object] = [
    *(0, -1, 1, 2, 7, 0.5, -0.0, 1e-320, 1e308, -1e308, 20, 21, 128, 129, 1000, 1001),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 10**400),
]
_TEXTS: list[object] = [
    *("", "a", "\0", "é", "\u2028", "😀", "\ud83d", "x" * 600, "x" * 40_000, "{{ 1 / 0 }}", "../../etc/passwd"),
    *("1" * 3000 + "x", "5m", "1h" * 300, "-0", "null", "true", "</s>", "<|im_start|>", "tiny", "tiny:latest"),
]
_OTHERS: list[object] = [None, True, False, [], {}, [[]], [None], {"": ""}, [[[[1]]]], {"a": {"b": [1, "x", None]}}]

_MAX_PLACES = 1000  # of a document with far more values, those that come first

_COMMON: Document = {
    "max_tokens": 2,
    "temperature": 0,
    "top_p": 0.9,
    "n": 2,
    "seed": 7,
    "stop": ["zz", "yy"],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "s",
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [3, 4],
    "skip_special_tokens": False,
    "logit_bias": {"5": -100, "7": 2.5},
    "user": "me",
    "metadata": {"a": "b"},
}
_OPTIONS: Document = {
    "num_predict": 2,
    "temperature": 0.5,
    "top_k": 10,
    "top_p": 0.5,
    "min_p": 0.0,
    "seed": 3,
    "stop": ["zz"],
    "repeat_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "num_ctx": 512,
    "num_gpu": 1,
    "use_mmap": True,
}


class BodyMaker:
    """Makes a path and a body at a time."""

    def __init__(self, seed: int, model: str) -> None:
        self._dice = random.Random(seed)
        self._model = model

    def openai(self) -> tuple[str, bytes]:
        path = self._dice.choice(OPENAI_PATHS)
        valid = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/tokenize": self._tokenize,
            "/detokenize": lambda: {"model": self._model, "tokens": [1, 2, 3]},
        }[path]()
        return path, self._spoiled(valid)

    def ollama(self) -> tuple[str, bytes]:
        path = self._dice.choice(OLLAMA_PATHS)
        valid: Document = {"model": self._model}
        if path == "/api/generate":
            valid |= {"prompt": "one two three", "system": "be brief", "raw": False, "keep_alive": "5m"}
        elif path == "/api/chat":
            valid |= {"messages": self._messages(), "keep_alive": 0}
        if path != "/api/show":
            valid |= {"stream": self._dice.random() < 0.5, "options": {**self._some(_OPTIONS), "num_predict": 2}}
        return path, self._spoiled(valid)

    # --- valid requests -----------------------------------------------------------------------------------------------

    def _completion(self) -> Document:
        prompts: list[object] = ["one two", ["one", "two"], [1, 2, 3], [[1, 2], [3]]]
        scored = self._some({"echo": True, "prompt_logprobs": 2, "max_tokens": 0})
        whole = {"model": self._model, "prompt": self._dice.choice(prompts), **self._fields(), "logprobs": 2}
        return {**whole, **scored}

    def _tokenize(self) -> Document:
        of = self._dice.choice(({"prompt": "one two"}, {"messages": self._messages(), "add_generation_prompt": False}))
        return {"model": self._model, **of, **self._some({"return_token_strs": True})}

    def _chat(self) -> Document:
        chat = {"logprobs": True, "top_logprobs": 3, "chat_template_kwargs": {"enable_thinking": False}}
        return {"model": self._model, "messages": self._messages(), **self._fields(), **self._some(chat)}

    def _messages(self) -> list[Document]:
        roles = ["system", "user", "assistant", "user"][self._dice.randrange(4) :]
        return [{"role": role, "content": f"words of the {role}"} for role in roles]

    def _fields(self) -> Document:
        fields = {**self._some(_COMMON), "max_tokens": 2}
        if not fields.get("stream"):
            fields.pop("stream_options", None)
        return fields

    def _some(self, fields: Document) -> Document:
        return {name: copy.deepcopy(value) for name, value in fields.items() if self._dice.random() < 0.3}

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def _spoiled(self, valid: Document) -> bytes:
        dice = self._dice
        for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
            dice.choice(
                (self._change, self._change, self._change, self._add, self._remove, self._deepen, self._repeat)
            )(valid)
        body = _encoded(valid)
        if dice.random() < 0.2:
            how: Callable[[bytes], bytes] = dice.choice(
                (self._cut, self._flip, self._double_field, self._pad, self._nest, self._widen)
            )
            body = how(body)
        return body

    def _change(self, document: Document) -> None:
        """A value, wherever in the document, becomes another one."""
        places = list(itertools.islice(_places(document), _MAX_PLACES))
        if places:
            holder, key = self._dice.choice(places)
            holder[key] = self._value()

    def _add(self, document: Document) -> None:
        names = (
            "tools",
            "logit_bias",
            "best_of",
            "echo",
            "suffix",
            "format",
            "think",
            "images",
            "x" * 500,
            "",
            "\0",
            "n",
        )
        document[self._dice.choice(names)] = self._value()

    def _remove(self, document: Document) -> None:
        if document:
            del document[self._dice.choice(list(document))]

    def _deepen(self, document: Document) -> None:
        value: object = 1
        for _ in range(self._dice.choice((5, 33, 200, 900))):
            value = [value] if self._dice.random() < 0.5 else {"a": value}
        document[self._dice.choice([*document, "chat_template_kwargs"])] = value

    def _repeat(self, document: Document) -> None:
        """A list of far too many."""
        count = 60_000 if self._dice.random() < 0.04 else self._dice.choice((33, 129, 257, 1025, 5000))
        name = self._dice.choice(("stop", "stop_token_ids", "prompt", "messages", "metadata", "chat_template_kwargs"))
        one = self._dice.choice(("a", 1, {"role": "user", "content": "x"}, [1], {}, 1.5))
        document[name] = (
            {str(number): "" for number in range(count)}
            if name in ("metadata", "chat_template_kwargs")
            else [one] * count
        )

    def _value(self) -> object:
        return copy.deepcopy(self._dice.choice(self._dice.choice((_NUMBERS, _TEXTS, _OTHERS))))

    def _cut(self, body: bytes) -> bytes:
        return body[: self._dice.randrange(len(body) + 1)]

    def _flip(self, body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(self._dice.choice((1, 3, 20))):
            changed[self._dice.randrange(len(changed))] = self._dice.randrange(256)
        return bytes(changed)

    def _double_field(self, body: bytes) -> bytes:
        return body[:-1] + b',"model":"other","model":"%s","n":1,"n":2}' % self._model.encode()

    def _pad(self, body: bytes) -> bytes:
        return body + self._dice.choice((b" " * 100_000, b"\0", b"{}", body, b"\n" * 10))

    def _nest(self, body: bytes) -> bytes:
        depth = self._dice.choice((10, 1000, 100_000))
        return b"[" * depth + body + b"]" * depth

    def _widen(self, body: bytes) -> bytes:
        filler = self._dice.choice((b"[],", b"1.2345678901234567e-300,", b'"a",', b"{},", b"9" * 4000 + b","))
        return body[:-1] + b',"x":[' + filler * (self._dice.choice((1000, 200_000)) // len(filler)) + b"1]}"


def _places(document: Document) -> Iterator[tuple[Any, Any]]:
    """Every value within, as its holder and its key."""
    left: list[Any] = [document]
    while left:
        value = left.pop()
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in pairs:
            yield value, key
            left.append(inner)


def _encoded(document: Document) -> bytes:
    try:
        return json.dumps(document).encode()
    except (RecursionError, ValueError):
        return b"{"
