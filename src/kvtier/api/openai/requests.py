"""Reads bodies of OpenAI's API into requests for the engine. A field that would be ignored is refused instead.

Options that OpenAI's API lacks have vLLM's names (`top_k`, `min_p`, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from kvtier.api.answer_form import PLAIN, AnswerForm
from kvtier.api.chat.conversation import ask
from kvtier.api.engines import KnownModel, ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import (
    MAX_ANSWERS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_OPENAI_TEMPERATURE,
    MAX_PROMPTS,
    MAX_RECORD_CHARACTERS,
)
from kvtier.api.neutral_fields import Neutral, invalid, refuse_others
from kvtier.api.openai.chat_requests import Marked, read_conversation
from kvtier.api.output_format import output_field, read_output_format
from kvtier.api.prompt_form import SILENT, PromptForm
from kvtier.api.prompt_length import check_length
from kvtier.api.request_rules import check_cache_options, check_texts, read_metadata, read_prefix, sampling_params
from kvtier.api.retention_fields import read_retention
from kvtier.engine.process.messages import Prompt, TextPrompt, TokenPrompt
from kvtier.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLES = ("max_tokens", "min_tokens", "n", "top_k", "seed")
_FLAGS = ("ignore_eos", "skip_special_tokens")
_TOKEN_ID_LIMIT = 1 << 31
_TOKEN_ID_DIGITS = 10

# Fields of OpenAI's and vLLM's APIs that are not supported, with the values, if any, that change nothing.
_NEUTRAL: Neutral = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "detokenize": (True,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_NEUTRAL_IN_CHAT: Neutral = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}
_NEUTRAL_IN_COMPLETIONS: Neutral = {"add_special_tokens": (True,)}


def read_chat(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Raises an `HttpError` that names the field, or `UnknownModel`."""
    name, model = _model(body, engines)
    marked: Marked = []
    chat = ask(read_conversation(body, read_output_format(body), marked), model)
    values, names = _sampling_values(body), {"logprobs": "top_logprobs"}
    prompt_form = PromptForm(num_logprobs=body.whole("prompt_logprobs"))
    values |= {**_chat_logprobs(body), **chat.sampling, "grammar": chat.grammar}
    values["prompt_logprobs"] = prompt_form.num_logprobs
    if body.has("max_completion_tokens"):
        names["max_tokens"] = "max_completion_tokens"
        max_tokens = body.whole("max_completion_tokens")
        if values.setdefault("max_tokens", max_tokens) != max_tokens:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
    check_cache_options(body)
    body.inner("prediction")  # it may make the answer faster, but never different
    refuse_others(body, _NEUTRAL_IN_CHAT)
    params = sampling_params({"max_tokens": None, **model.options, **values}, names)
    prefix = read_prefix(body)
    asked = _generation_request(body, name, model, [chat.prompt], params, prompt_form, chat.form, marked)
    return replace(asked, prefix=prefix)


def read_completion(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Raises as `read_chat`."""
    name, model = _model(body, engines)
    prompts = _prompts(body)
    values = {**_sampling_values(body), "grammar": read_output_format(body)}
    logprobs = body.whole("logprobs")
    if logprobs is not None:
        values["logprobs"] = logprobs
    prompt_form = PromptForm(echoes=body.flag("echo") or False, num_logprobs=body.whole("prompt_logprobs"))
    values = {**model.options, **values}
    params = sampling_params({**values, "prompt_logprobs": _num_prompt_logprobs(prompt_form, values)})
    if prompt_form.echoes and any(isinstance(one, TextPrompt) and one.suffix for one in prompts):
        raise invalid("echo", "echo cannot be combined with suffix")
    best_of = body.whole("best_of")
    if best_of is not None and best_of != params.n:
        raise body.refuse("best_of", f"is supported only if it equals n, which is {params.n}")
    refuse_others(body, _NEUTRAL_IN_COMPLETIONS)
    return _generation_request(body, name, model, prompts, params, prompt_form)


def _model(body: JsonBody, engines: ModelCatalog) -> tuple[str, KnownModel]:
    """The name that the client uses, and the model, whose options replace sampling fields that are absent."""
    name = body.needed_text("model")
    return name, engines.find(name)


def _generation_request(
    body: JsonBody,
    name: str,
    model: KnownModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    prompt_form: PromptForm = SILENT,
    form: AnswerForm = PLAIN,
    marked: Sequence[tuple[float, int | None]] = (),
) -> GenerationRequest:
    """Read the fields that both bodies have, and check that no field is left unread."""
    if len(prompts) * params.n > MAX_ANSWERS:
        raise invalid("n", f"n must not make more than {MAX_ANSWERS} answers, but is {params.n} for each prompt")
    for prompt in prompts:
        check_length(prompt, model.hello)
    is_streamed = body.flag("stream") or False
    if is_streamed and prompt_form.num_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be combined with stream")
    options = body.inner("stream_options")
    if options is not None and not is_streamed:
        raise invalid("stream_options", "stream_options needs stream to be true")
    includes_usage = options is not None and options.flag("include_usage") is True
    if options is not None:
        options.flag("continuous_usage_stats")  # the final usage is the same
        options.flag("include_obfuscation")  # padding
        options.refuse_rest()
    cache_salt = body.short_text("cache_salt", MAX_CACHE_SALT_CHARACTERS)
    if cache_salt == "":
        raise body.wrong("cache_salt", "text that is not empty")
    session = body.short_text("prompt_cache_key", MAX_RECORD_CHARACTERS) or ""
    explains = body.flag("explain") or False
    if explains and len(prompts) > 1:
        raise invalid("explain", f"explain needs a single prompt, not {len(prompts)}")
    if explains and is_streamed and not includes_usage:
        raise invalid("explain", "explain needs stream_options.include_usage in a stream: it is part of the usage")
    retention = read_retention(body, marked)
    check_texts(body, "user", "safety_identifier", "guided_decoding_backend", "service_tier")
    body.flag("store")  # chats are not stored
    read_metadata(body)
    refuse_others(body, _NEUTRAL)
    body.refuse_rest()
    return GenerationRequest(
        name,
        model,
        prompts,
        params,
        is_streamed,
        includes_usage,
        cache_salt or "",
        form,
        prompt_form=prompt_form,
        session=session,
        explains=explains,
        retention=retention,
        grammar_field=output_field(body),
    )


# --- prompts ----------------------------------------------------------------------------------------------------------


def _prompts(body: JsonBody) -> list[Prompt]:
    given = body.value("prompt")
    if given is None:
        raise HttpError(400, "prompt is missing", "missing_field", "prompt")
    suffix = body.text("suffix") or ""
    if isinstance(given, str):
        return [TextPrompt(given, suffix=suffix)]
    if isinstance(given, list) and given:
        if suffix and not all(isinstance(one, str) for one in given):
            raise invalid("suffix", "suffix needs a text prompt")
        if are_token_ids(given):
            return [TokenPrompt(given)]
        if len(given) > MAX_PROMPTS:
            raise invalid("prompt", f"prompt must not be more than {MAX_PROMPTS} prompts, but is {len(given)}")
        if all(isinstance(one, str) for one in given):
            return [TextPrompt(one, suffix=suffix) for one in given]
        if all(isinstance(one, list) and one and are_token_ids(one) for one in given):
            return [TokenPrompt(one) for one in given]
    raise body.wrong("prompt", "text, a list of texts, a list of token ids, or a list of such lists")


def are_token_ids(given: list[Any]) -> TypeGuard[list[int]]:
    """Checks without a Python loop: there may be a million ids."""
    if set(map(type, given)) - {int}:
        return False
    return not given or (min(given) >= 0 and max(given) < _TOKEN_ID_LIMIT)


# --- sampling ---------------------------------------------------------------------------------------------------------


def _sampling_values(body: JsonBody) -> dict[str, object]:
    """The sampling values in the body, by the names of `SamplingParams`."""
    values: dict[str, object] = {name: body.number(name) for name in _NUMBERS}
    if (body.number("temperature") or 0.0) > MAX_OPENAI_TEMPERATURE:
        given = shown(body.value("temperature"))
        raise invalid("temperature", f"temperature must be from 0 to {MAX_OPENAI_TEMPERATURE:g}, not {given}")
    values |= {name: body.whole(name) for name in _WHOLES}
    values |= {name: body.flag(name) for name in _FLAGS}
    values["stop"] = _stop(body)
    values["stop_token_ids"] = _stop_token_ids(body)
    values["logit_bias"] = _logit_bias(body)
    if values["top_k"] == -1:  # in vLLM's API: all tokens
        values["top_k"] = 0
    return {name: value for name, value in values.items() if value is not None}


def _stop(body: JsonBody) -> tuple[str, ...] | None:
    given = body.value("stop")
    if given is None:
        return None
    strings = given if isinstance(given, list) else [given]
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"stop must not be more than {MAX_STOP_STRINGS}, but is {len(strings)}")
    if not all(isinstance(one, str) and one for one in strings):
        raise body.wrong("stop", "text, or a list of texts, none of them empty")
    return tuple(strings)


def _stop_token_ids(body: JsonBody) -> tuple[int, ...] | None:
    given = body.items("stop_token_ids", MAX_STOP_TOKEN_IDS)
    if given is None:
        return None
    if not are_token_ids(given):
        raise body.wrong("stop_token_ids", "a list of token ids")
    return tuple(given)


def _logit_bias(body: JsonBody) -> dict[int, object] | None:
    """Token ids are field names in JSON. `SamplingParams` checks the range of the numbers."""
    given = body.value("logit_bias")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise body.wrong("logit_bias", "an object that maps token ids to numbers")
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"logit_bias must not be more than {MAX_LOGIT_BIAS}, but is {len(given)}")
    bias: dict[int, object] = {}
    for name, value in given.items():
        is_id = name.isascii() and name.isdigit() and len(name) <= _TOKEN_ID_DIGITS
        if not is_id or int(name) >= _TOKEN_ID_LIMIT:
            raise invalid("logit_bias", f"logit_bias must have token ids as names, not {shown(name)}")
        bias[int(name)] = value
    return bias


def _num_prompt_logprobs(form: PromptForm, values: Mapping[str, object]) -> int | None:
    """How many log-probabilities per prompt token the engine computes, for `prompt_logprobs` and `echo` together.

    An echo with `max_tokens` 0 asks for 0, so that the prompt is computed although no token is generated.
    """
    wanted: list[object] = [form.num_logprobs]
    if form.echoes:
        wanted += [values.get("logprobs"), 0 if values.get("max_tokens") == 0 else None]
    return max((one for one in wanted if isinstance(one, int)), default=None)


def _chat_logprobs(body: JsonBody) -> dict[str, object]:
    is_asked, top = body.flag("logprobs"), body.whole("top_logprobs")
    if top and not is_asked:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    return {"logprobs": top or 0} if is_asked else {}
