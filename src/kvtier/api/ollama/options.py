"""Translates Ollama's `options` to the engine's `SamplingParams`.

Every option of Ollama is known here. Some are applied, some have no effect on an answer and are accepted, and the rest,
which the engine does not support, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import InvalidParameter

OLLAMA_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""Ollama's names for the fields of `SamplingParams` that have another name there."""

_DEFAULTS: Mapping[str, object] = {"max_tokens": None, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults, but without its penalty of 1.1 on the last 64 tokens: penalties here apply to all tokens."""

_NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_MACHINE_NUMBERS = ("num_gpu", "main_gpu", "num_thread", "num_batch", "num_keep")
_MACHINE_FLAGS = ("use_mmap", "use_mlock", "numa", "low_vram", "f16_kv")
_WHOLE_TEXT = -1
_ANY_SEED = -1


def sampling_params(options: JsonBody, defaults: Mapping[str, object], *, logprobs: int | None) -> SamplingParams:
    """The values in `options`, then the model's `defaults`, then Ollama's. Raises `HttpError` for a wrong option."""
    given = _given_values(options)
    _check_context(options)
    _check_machine(options)
    _refuse_other_samplers(options)
    values: dict[str, Any] = {**_DEFAULTS, **defaults, **given, "n": 1, "logprobs": logprobs}
    try:
        params = SamplingParams(**values)
    except InvalidParameter as error:
        raise _with_ollama_name(error) from error
    _check_penalty_window(options, given)
    options.refuse_rest()
    return params


def given_options(options: JsonBody) -> dict[str, object]:
    """The given options by the names of `SamplingParams`, which are also vLLM's. Raises `HttpError` for a wrong one."""
    sampling_params(options, {}, logprobs=None)  # checks all of them
    return {name: value for name, value in _given_values(options).items() if value is not None}


def _given_values(options: JsonBody) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, ours in _NUMBERS.items():
        number = options.number(name)
        if number is not None:
            found[ours] = number
    limit = options.whole("num_predict")
    if limit is not None:
        found["max_tokens"] = limit if limit > 0 else None  # in Ollama, too, the answer may then fill the context
    top_k = options.whole("top_k")
    if top_k is not None:
        found["top_k"] = max(0, top_k)
    seed = options.whole("seed")
    if seed is not None:
        found["seed"] = None if seed == _ANY_SEED else seed
    stop = options.value("stop")
    if stop is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise options.wrong("stop", "a text or a list of texts, none of them empty")
        found["stop"] = tuple(texts)
    return found


def _check_context(options: JsonBody) -> None:
    """Only check the type: the model's own context length applies; Ollama, too, reduces a larger one to it."""
    num_ctx = options.whole("num_ctx")
    if num_ctx is not None and num_ctx <= 0:
        raise HttpError(400, f"options.num_ctx must be positive, not {num_ctx}", "invalid_value", "options.num_ctx")


def _check_machine(options: JsonBody) -> None:
    """Only check the types: the deployment decides how the model runs."""
    for name in _MACHINE_NUMBERS:
        options.whole(name)
    for name in _MACHINE_FLAGS:
        options.flag(name)


def _refuse_other_samplers(options: JsonBody) -> None:
    if options.whole("mirostat"):
        raise options.refuse("mirostat", "is not supported here: only 0 is")
    for name in ("mirostat_tau", "mirostat_eta"):  # without mirostat they have no effect, in Ollama too
        options.number(name)
    for name in ("typical_p", "tfs_z"):
        if options.number(name) not in (None, 1.0):
            raise options.refuse(name, "is not supported here: only 1 is")
    for name in ("vocab_only", "logits_all", "embedding_only"):
        if options.flag(name):
            raise options.refuse(name, "is not supported here: only false is")


def _check_penalty_window(options: JsonBody, given: Mapping[str, Any]) -> None:
    """Refuse a window for penalties that the client asks for.

    The model's default penalties apply to all tokens, even if the client always sends a window.
    """
    params = SamplingParams(**{name: value for name, value in given.items() if name in _PENALTIES})
    window = options.whole("repeat_last_n")
    spares_newlines = options.flag("penalize_newline") is False
    if not params.has_penalties:
        return
    if window not in (None, _WHOLE_TEXT):
        sentence = f"is not supported with penalties, which apply to all tokens here: only {_WHOLE_TEXT} is"
        raise options.refuse("repeat_last_n", sentence)
    if spares_newlines:
        raise options.refuse("penalize_newline", "is not supported with penalties: only true is")


def _with_ollama_name(error: InvalidParameter) -> HttpError:
    """The error's sentence begins with our name of a field; the client knows Ollama's name."""
    name, _, rest = str(error).partition(" ")
    shown = "top_logprobs" if name == "logprobs" else f"options.{OLLAMA_NAMES.get(name, name)}"
    return HttpError(400, f"{shown} {rest}", "invalid_value", shown)
