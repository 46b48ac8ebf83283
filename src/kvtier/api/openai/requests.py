"""The bodies of OpenAI's API, read into what the engine is asked. A field that would be ignored is refused instead.

What the fields of OpenAI's API leave out comes under vLLM's names (`top_k`, `min_p`, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvtier.api.engines import KnownModel, ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError, http_error_of
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import (
    MAX_ANSWERS,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_OPENAI_TEMPERATURE,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_RECORD_CHARACTERS,
    MAX_TEMPLATE_CHARACTERS,
    MAX_TEMPLATE_DEPTH,
    MAX_TEMPLATE_VALUES,
)
from kvtier.api.prompt_length import check_length
from kvtier.engine.process.messages import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from kvtier.engine.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from kvtier.errors import InvalidParameter

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLES = ("max_tokens", "min_tokens", "n", "top_k", "seed")
_RECORDS = ("user", "prompt_cache_key", "safety_identifier")
_FLAGS = ("ignore_eos", "skip_special_tokens")
_TOKEN_ID_LIMIT = 1 << 31

# Fields of OpenAI's and vLLM's that are not served: the values, if any, at which they change nothing.
_Neutral = Mapping[str, tuple[object, ...]]
_NEUTRAL: _Neutral = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_NEUTRAL_IN_CHAT: _Neutral = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NEUTRAL_IN_COMPLETIONS: _Neutral = {"add_special_tokens": (True,), "suffix": ("",)}
_NEUTRAL_IN_MESSAGES: _Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_NEUTRAL_IN_STREAM_OPTIONS: _Neutral = {"include_obfuscation": (False,)}


def read_chat(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Raises a `HttpError` that names the field, or `UnknownModel`."""
    name, model = _model(body, engines)
    prompt = ChatPrompt(_messages(body), _template_values(body))
    values, names = _sampling_values(body), {"logprobs": "top_logprobs"}
    values |= _chat_logprobs(body)
    if body.has("max_completion_tokens"):
        names["max_tokens"] = "max_completion_tokens"
        max_tokens = body.whole("max_completion_tokens")
        if values.setdefault("max_tokens", max_tokens) != max_tokens:
            raise _invalid("max_tokens", "max_tokens and max_completion_tokens differ: give one of them")
    _refuse_others(body, _NEUTRAL_IN_CHAT)
    params = _params({"max_tokens": None, **model.options, **values}, names)
    return _generation_request(body, name, model, [prompt], params)


def read_completion(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """As `read_chat`."""
    name, model = _model(body, engines)
    prompts = _prompts(body)
    values = _sampling_values(body)
    logprobs = body.whole("logprobs")
    if logprobs is not None:
        values["logprobs"] = logprobs
    params = _params({**model.options, **values})
    best_of = body.whole("best_of")
    if best_of is not None and best_of != params.n:
        raise body.refuse("best_of", f"is not supported here, except if it equals n, which is {params.n}")
    _refuse_others(body, _NEUTRAL_IN_COMPLETIONS)
    return _generation_request(body, name, model, prompts, params)


def _model(body: JsonBody, engines: ModelCatalog) -> tuple[str, KnownModel]:
    """What the client calls it, and the model, whose options stand for sampling fields that are absent."""
    name = body.needed_text("model")
    return name, engines.find(name)


def _generation_request(
    body: JsonBody, name: str, model: KnownModel, prompts: Sequence[Prompt], params: SamplingParams
) -> GenerationRequest:
    """With what both bodies have, and the check that nothing was left unread."""
    if len(prompts) * params.n > MAX_ANSWERS:
        raise _invalid("n", f"n must not make more than {MAX_ANSWERS} answers, but is {params.n} of each prompt")
    for prompt in prompts:
        check_length(prompt, model.hello)
    is_streamed = body.flag("stream") or False
    options = body.inner("stream_options")
    if options is not None and not is_streamed:
        raise _invalid("stream_options", "stream_options needs stream to be true")
    includes_usage = options is not None and options.flag("include_usage") is True
    if options is not None:
        options.flag("continuous_usage_stats")  # the count at the end is the same with it
        _refuse_others(options, _NEUTRAL_IN_STREAM_OPTIONS)
        options.refuse_rest()
    cache_salt = body.short_text("cache_salt", MAX_CACHE_SALT_CHARACTERS)
    if cache_salt == "":
        raise body.wrong("cache_salt", "text that is not empty")
    _check_records(body)
    _refuse_others(body, _NEUTRAL)
    body.refuse_rest()
    return GenerationRequest(name, model, prompts, params, is_streamed, includes_usage, cache_salt or "")


def _check_records(body: JsonBody) -> None:
    """What callers send for their records changes nothing: only the types are looked at."""
    for name in _RECORDS:
        body.short_text(name, MAX_RECORD_CHARACTERS)
    metadata = body.value("metadata")
    if metadata is not None and (not isinstance(metadata, dict) or len(metadata) > MAX_METADATA):
        raise body.wrong("metadata", f"an object of at most {MAX_METADATA} texts")
    if isinstance(metadata, dict) and not all(isinstance(one, str) for one in metadata.values()):
        raise body.wrong("metadata", "an object of texts")


# --- prompts ----------------------------------------------------------------------------------------------------------


def _messages(body: JsonBody) -> list[ChatMessage]:
    messages = body.items("messages", MAX_MESSAGES)
    if not messages:
        raise body.wrong("messages", "a list of at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, path: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise _invalid(path, f"{path} must be an object, not {shown(message)}")
    body = JsonBody(message, f"{path}.")
    role = _ROLES.get(body.needed_text("role"))
    if role is None:
        raise body.wrong("role", f"one of {', '.join(_ROLES)}")
    _refuse_others(body, _NEUTRAL_IN_MESSAGES)
    found = ChatMessage(role, _content(body, path), body.text("name"))
    body.refuse_rest()
    return found


def _content(body: JsonBody, path: str) -> str:
    content = body.value("content")
    if isinstance(content, list):
        body.items("content", MAX_PARTS)
        return "".join(_text_of_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise body.wrong("content", "text, or a list of parts of text")
    return content


def _text_of_part(part: object, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise _invalid(path, f"{path} must be a part of the type text, not {shown(part)}: there is no other here")
    body = JsonBody(part, f"{path}.")
    body.value("type")
    text = body.needed_text("text")
    body.refuse_rest()
    return text


def _template_values(body: JsonBody) -> dict[str, object]:
    values = body.value("chat_template_kwargs")
    if values is None:
        return {}
    if not isinstance(values, dict) or not _is_plain(values):
        expected = f"an object of at most {MAX_TEMPLATE_DEPTH} levels, {MAX_TEMPLATE_VALUES} values"
        raise body.wrong("chat_template_kwargs", f"{expected} and {MAX_TEMPLATE_CHARACTERS} characters")
    return values


def _is_plain(values: object) -> bool:
    """Whether it is within bounds, and a message to an engine can carry it."""
    left: list[tuple[object, int]] = [(values, 0)]
    num_values = num_characters = 0
    while left:
        value, depth = left.pop()
        num_values += 1
        if isinstance(value, (dict, list)):
            if depth >= MAX_TEMPLATE_DEPTH or len(value) > MAX_TEMPLATE_VALUES:
                return False
            if isinstance(value, dict):
                num_characters += sum(map(len, value))
            left += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, str):
            num_characters += len(value)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            return False
        if num_values + len(left) > MAX_TEMPLATE_VALUES + 1 or num_characters > MAX_TEMPLATE_CHARACTERS:
            return False
    return True


def _prompts(body: JsonBody) -> list[Prompt]:
    given = body.value("prompt")
    if given is None:
        raise HttpError(400, "prompt is missing", "missing_field", "prompt")
    if isinstance(given, str):
        return [TextPrompt(given)]
    if isinstance(given, list) and given:
        if _are_token_ids(given):
            return [TokenPrompt(given)]
        if len(given) > MAX_PROMPTS:
            raise _invalid("prompt", f"prompt must not be more than {MAX_PROMPTS} prompts, but is {len(given)}")
        if all(isinstance(one, str) for one in given):
            return [TextPrompt(one) for one in given]
        if all(isinstance(one, list) and one and _are_token_ids(one) for one in given):
            return [TokenPrompt(one) for one in given]
    raise body.wrong("prompt", "text, a list of texts, a list of token ids, or a list of such lists")


def _are_token_ids(given: list[Any]) -> TypeGuard[list[int]]:
    """Without a loop over them: there may be a million."""
    if set(map(type, given)) - {int}:
        return False
    return not given or (min(given) >= 0 and max(given) < _TOKEN_ID_LIMIT)


# --- sampling ---------------------------------------------------------------------------------------------------------


def _sampling_values(body: JsonBody) -> dict[str, object]:
    """Those that were given, by the names of `SamplingParams`."""
    values: dict[str, object] = {name: body.number(name) for name in _NUMBERS}
    if (body.number("temperature") or 0.0) > MAX_OPENAI_TEMPERATURE:
        given = shown(body.value("temperature"))
        raise _invalid("temperature", f"temperature must be from 0 to {MAX_OPENAI_TEMPERATURE:g}, not {given}")
    values |= {name: body.whole(name) for name in _WHOLES}
    values |= {name: body.flag(name) for name in _FLAGS}
    values["stop"] = _stop(body)
    values["stop_token_ids"] = _stop_token_ids(body)
    if values["top_k"] == -1:  # vLLM's word for all of them
        values["top_k"] = 0
    return {name: value for name, value in values.items() if value is not None}


def _stop(body: JsonBody) -> tuple[str, ...] | None:
    given = body.value("stop")
    if given is None:
        return None
    strings = given if isinstance(given, list) else [given]
    if len(strings) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"stop must not be more than {MAX_STOP_STRINGS}, but is {len(strings)}")
    if not all(isinstance(one, str) and one for one in strings):
        raise body.wrong("stop", "text, or a list of texts, none of them empty")
    return tuple(strings)


def _stop_token_ids(body: JsonBody) -> tuple[int, ...] | None:
    given = body.items("stop_token_ids", MAX_STOP_TOKEN_IDS)
    if given is None:
        return None
    if not _are_token_ids(given):
        raise body.wrong("stop_token_ids", "a list of token ids")
    return tuple(given)


def _chat_logprobs(body: JsonBody) -> dict[str, object]:
    is_asked, top = body.flag("logprobs"), body.whole("top_logprobs")
    if top and not is_asked:
        raise _invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    return {"logprobs": top or 0} if is_asked else {}


def _params(values: dict[str, Any], names: Mapping[str, str] | None = None) -> SamplingParams:
    """`names` are those by which the client knows parameters, where they differ."""
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        own, _, rest = str(error).partition(" ")
        raise http_error_of(InvalidParameter(f"{(names or {}).get(own, own)} {rest}")) from error


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refuse_others(body: JsonBody, neutral: _Neutral) -> None:
    """Raises a `HttpError` for a field that has a value at which it would have to change something."""
    for name, values in neutral.items():
        found = body.value(name)
        if found is not None and not any(type(found) is type(value) and found == value for value in values):
            except_as = f", except as {' or '.join(shown(value) for value in values)}" if values else ""
            raise body.refuse(name, f"is not supported here{except_as}")


def _invalid(parameter: str, sentence: str) -> HttpError:
    return HttpError(400, sentence, "invalid_value", parameter)
