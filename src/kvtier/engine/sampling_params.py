"""A request's sampling parameters, checked once. No torch: the API and the scheduler use them too.

A `SamplingParams` that exists is valid: however it is made, in code or decoded from JSON, it passes the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized

import msgspec

from kvtier.engine.grammar import Grammar
from kvtier.errors import InvalidParameter

GREEDY_BELOW = 1e-5
"""Temperatures below this pick the likeliest token: dividing by them would only overflow."""

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
"""Limits on the tokens of one request whose logits are changed, and on the change."""

MAX_BIAS = 100.0
MAX_PROMPT_SCORES = 1 << 19
"""Limit on the log-probabilities of one prompt: for each token, its own and its alternatives."""

MAX_CHOICES = 128
MAX_TOKENS = (1 << 31) - 1
"""The largest `max_tokens`, `min_tokens` and `top_k`, and the largest token id: what 32 bits hold."""

MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 512
"""Length limit of one stop string: after each token, the end of an answer is searched for all of them."""

MAX_STOP_TOKEN_IDS = 256
MAX_KEPT_SPECIAL_TOKENS = 16
_SHOWN_CHARACTERS = 60
_STRINGS = "a string or a list of strings, none of them empty"
_UINT64 = 1 << 64
_CHOICE_STEP = 0x9E37_79B9_7F4A_7C15


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen, and when they end.

    `stop` may be given as one string but is always stored as a tuple, which `stop_strings` returns with its type.
    Special tokens in `kept_special_tokens` stay in the text even if others are skipped, for a program that reads the
    answer. Raises `InvalidParameter` with the name of the first invalid parameter.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[str, ...] = ()
    grammar: Grammar | None = None
    logit_bias: dict[int, float] = {}
    """Added to the logits of tokens, by id: with -100 a token never comes, with 100 no other does."""
    prompt_logprobs: int | None = None
    """Alternatives to report with the log-probability of each prompt token. Such a prompt is always computed whole.

    Only with this may `max_tokens` be 0, to request nothing but the prompt.
    """

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_shape_of_distribution()
        self._check_penalties()
        self._check_ends()
        _check_whole("seed", self.seed, low=-_UINT64 // 2, high=_UINT64 - 1, optional=True)
        _check_whole("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        _check_whole("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        self._check_bias()
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidParameter(f"grammar must be a Grammar, not {_shown(self.grammar)}")
        _check_count("kept_special_tokens", self.kept_special_tokens, MAX_KEPT_SPECIAL_TOKENS)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name} must be true or false, not {_shown(getattr(self, name))}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def choice(self, index: int) -> SamplingParams:
        """The parameters of one of the `n` answers: with its own seed, which for the first is the request's."""
        if self.n == 1 and index == 0:
            return self
        seed = None if self.seed is None else (self.seed + index * _CHOICE_STEP) % _UINT64
        return msgspec.structs.replace(self, n=1, seed=seed)

    def _check_lengths(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        _check_whole("max_tokens", self.max_tokens, low=least, high=MAX_TOKENS, optional=True)
        _check_whole("min_tokens", self.min_tokens, low=0, high=MAX_TOKENS)
        _check_whole("n", self.n, low=1, high=MAX_CHOICES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens must not exceed max_tokens, but {self.min_tokens} is more than {self.max_tokens}"
            )

    def _check_shape_of_distribution(self) -> None:
        _check_number("temperature", self.temperature, low=0.0, high=1000.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, above_low=True)
        _check_whole("top_k", self.top_k, low=0, high=MAX_TOKENS)
        _check_number("min_p", self.min_p, low=0.0, high=1.0)

    def _check_penalties(self) -> None:
        _check_number("repetition_penalty", self.repetition_penalty, low=0.001, high=1000.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)

    def _check_bias(self) -> None:
        bias: object = self.logit_bias
        if not isinstance(bias, Mapping):
            raise InvalidParameter(f"logit_bias must be a number for each of some token ids, not {_shown(bias)}")
        _check_count("logit_bias", bias, MAX_LOGIT_BIAS)
        for token_id, value in bias.items():
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKENS:
                raise InvalidParameter(f"logit_bias must map token ids, but {_shown(token_id)} is not one")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not -MAX_BIAS <= value <= MAX_BIAS:
                sentence = f"logit_bias must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, but that of the token {token_id}"
                raise InvalidParameter(f"{sentence} is {_shown(value)}")

    def _check_ends(self) -> None:
        strings: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(strings, Sequence) or isinstance(strings, (bytes, bytearray)):
            raise InvalidParameter(f"stop must be {_STRINGS}, not {_shown(strings)}")
        _check_count("stop", strings, MAX_STOP_STRINGS)
        if not all(isinstance(one, str) and one for one in strings):
            raise InvalidParameter(f"stop must be {_STRINGS}, not {_shown(self.stop)}")
        longest = max(map(len, strings), default=0)
        if longest > MAX_STOP_CHARACTERS:
            sentence = f"stop must not have a string of more than {MAX_STOP_CHARACTERS} characters, but one has"
            raise InvalidParameter(f"{sentence} {longest}")
        ids: object = self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise InvalidParameter(f"stop_token_ids must be a list of token ids, not {_shown(ids)}")
        _check_count("stop_token_ids", ids, MAX_STOP_TOKEN_IDS)
        for token_id in ids:
            _check_whole("each of stop_token_ids", token_id, low=0, high=MAX_TOKENS)
        msgspec.structs.force_setattr(self, "stop", tuple(strings))
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(ids))


def _check_whole(name: str, value: object, *, low: int, high: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(f"{name} must be a whole number, not {_shown(value)}")
    if not low <= value <= high:
        raise InvalidParameter(f"{name} must be at least {low} and at most {high}, not {_shown(value)}")


def _check_number(name: str, value: object, *, low: float, high: float, above_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise InvalidParameter(f"{name} must be a finite number, not {_shown(value)}")
    if not low <= value <= high or (above_low and value == low):
        least = f"more than {low:g}" if above_low else f"at least {low:g}"
        raise InvalidParameter(f"{name} must be {least} and at most {high:g}, not {value}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return False


def _check_count(name: str, values: Sized, most: int) -> None:
    if len(values) > most:
        raise InvalidParameter(f"{name} must not be more than {most}, but is {len(values)}")


def _shown(value: object) -> str:
    """A value as quoted in an error, truncated if it is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number with thousands of digits
        return "a number that is too large"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
