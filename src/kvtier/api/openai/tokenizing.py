"""Bodies and answers of `/tokenize` and `/detokenize`, compatible with vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvtier.api.chat.conversation import ask
from kvtier.api.engines import KnownModel, ModelCatalog
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.limits import MAX_DETOKENIZED
from kvtier.api.neutral_fields import refuse_others
from kvtier.api.openai.chat_requests import read_conversation
from kvtier.api.openai.requests import are_token_ids
from kvtier.api.prompt_form import PromptForm
from kvtier.api.prompt_length import check_length
from kvtier.engine.process.messages import Prompt, TextPrompt, TokenPrompt
from kvtier.engine.sampling_params import SamplingParams

_NEUTRAL = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": (),
}
_NO_ANSWER = SamplingParams()

_encode = msgspec.json.Encoder().encode


def read_tokenize(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Read a prompt or a conversation to be tokenized. Raises `HttpError`, or `UnknownModel`."""
    name, model = _model(body, engines)
    prompt: Prompt
    if body.has("messages"):
        if body.has("prompt"):
            raise HttpError(400, "prompt and messages cannot be combined", "invalid_value", "prompt")
        refuse_others(body, {**_NEUTRAL, "add_special_tokens": (False,)})
        adds = body.flag("add_generation_prompt") is not False
        chat = ask(read_conversation(body), model).prompt
        prompt = msgspec.structs.replace(chat, adds_generation_prompt=adds)
    else:
        prompt = TextPrompt(body.needed_text("prompt"), body.flag("add_special_tokens") is not False)
    check_length(prompt, model.hello)
    form = PromptForm(has_token_texts=body.flag("return_token_strs") is True)
    body.refuse_rest()
    return GenerationRequest(name, model, [prompt], _NO_ANSWER, False, prompt_form=form)


def read_detokenize(body: JsonBody, engines: ModelCatalog) -> GenerationRequest:
    """Read token ids to be turned into text. Raises `HttpError`, or `UnknownModel`."""
    name, model = _model(body, engines)
    tokens = body.items("tokens", MAX_DETOKENIZED)
    if tokens is None:
        raise HttpError(400, "tokens is missing", "missing_field", "tokens")
    if not are_token_ids(tokens):
        raise body.wrong("tokens", "a list of token ids")
    body.refuse_rest()
    return GenerationRequest(name, model, [TokenPrompt(tokens)], _NO_ANSWER, False)


ReadTokens = Callable[[JsonBody, ModelCatalog], GenerationRequest]


def _model(body: JsonBody, engines: ModelCatalog) -> tuple[str, KnownModel]:
    """A body without a model means the deployment's only one."""
    name = body.text("model")
    if name is None and len(engines.models) == 1:
        return engines.models[0].name, engines.models[0]
    found = body.needed_text("model") if name is None else name
    return found, engines.find(found)


class _Tokens(msgspec.Struct):
    count: int
    max_model_len: int | None
    tokens: Sequence[int]
    token_strs: Sequence[str] | None


def token_list(token_ids: Sequence[int], texts: Sequence[str] | None, max_model_len: int | None) -> bytes:
    """`texts` has the text of each token, if the request asks for them."""
    return _encode(_Tokens(len(token_ids), max_model_len, token_ids, texts))


def token_text(text: str) -> bytes:
    return _encode({"prompt": text})
