"""A process that reads large bodies, which would block the HTTP server's event loop.

    python -m kvtier.api.reading FD

Requests arrive over the Unix socket `FD`, one at a time (`api/body_messages`); the process ends with that socket. It
returns prompts encoded: the HTTP server forwards them without decoding.
"""

from __future__ import annotations

import gc
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.api.access import ApiTenant
from kvtier.api.anthropic.requests import read_count, read_message
from kvtier.api.body_messages import (
    ANTHROPIC_COUNT,
    ANTHROPIC_MESSAGE,
    DETOKENIZE,
    LENGTH_BYTES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OPENAI_CHAT,
    OPENAI_COMPLETION,
    OPENAI_RESPONSE,
    TOKENIZE,
    BodyAsks,
    BodyLoads,
    BodyPasses,
    BodyRefused,
    BodyReply,
    ModelSnapshot,
    ReadBody,
    decode_question,
    framed,
    length_of,
)
from kvtier.api.engines import ModelCatalog, beginning_of, find_model
from kvtier.api.generation import GenerationRequest
from kvtier.api.http_error import HttpError, http_error_of
from kvtier.api.json_body import JsonBody, decode_body
from kvtier.api.ollama import requests as ollama_requests
from kvtier.api.ollama.passed import OLLAMA_KINDS
from kvtier.api.openai import requests as openai_requests
from kvtier.api.openai import tokenizing
from kvtier.api.openai.passed import reader_for, unknown_here
from kvtier.api.passing import salt_maker
from kvtier.api.responses.requests import read_response
from kvtier.engine.process.messages import EncodedPrompt, encode_part
from kvtier.errors import KvtierError
from kvtier.priority import step_back

_Read = Callable[[JsonBody, ModelCatalog], GenerationRequest | ollama_requests.LoadModel]

KINDS: Mapping[str, _Read] = {
    OPENAI_CHAT: openai_requests.read_chat,
    OPENAI_COMPLETION: openai_requests.read_completion,
    TOKENIZE: tokenizing.read_tokenize,
    DETOKENIZE: tokenizing.read_detokenize,
    OLLAMA_CHAT: ollama_requests.read_chat,
    OLLAMA_GENERATE: ollama_requests.read_generate,
    OPENAI_RESPONSE: read_response,
    ANTHROPIC_MESSAGE: read_message,
    ANTHROPIC_COUNT: read_count,
}

_MAX_MEMORY_BYTES = 4 << 30
_NICENESS = 15
"""On few processors, engines and streams have priority."""


class _Snapshot:
    """A `ModelCatalog` of the models in a request."""

    def __init__(self, models: Sequence[ModelSnapshot]) -> None:
        self.models = models
        self.known = ", ".join(model.name for model in models)

    def find(self, name: str) -> ModelSnapshot:
        return find_model(self.models, name)


def read(question: ReadBody, body: bytes) -> BodyReply:
    """Read a body; the reply has its request, or an error."""
    try:
        passes = _read_for_vllm(question, body)
        if passes is not None:
            return passes
        if question.kind not in KINDS:
            name = decode_body(body).text("model")
            raise unknown_here(name, question.kind, question.models)
        asked = KINDS[question.kind](decode_body(body), _Snapshot(question.models))
    except HttpError as error:
        return _refused(error)
    except KvtierError as error:
        return _refused(http_error_of(error))
    except MemoryError:
        return _refused(HttpError(413, "reading the body takes too much memory", "body_too_large"))
    if isinstance(asked, ollama_requests.LoadModel):
        return BodyLoads(asked.name, asked.done_reason)
    prompts = [one for one in asked.prompts if not isinstance(one, EncodedPrompt)]
    return BodyAsks(
        asked.name,
        asked.model.name,
        [msgspec.Raw(encode_part(prompt)) for prompt in prompts],
        [beginning_of(prompt) for prompt in prompts],
        asked.params,
        asked.is_streamed,
        asked.includes_usage,
        asked.cache_salt,
        asked.form,
        asked.record,
        asked.prompt_form,
        asked.session,
        asked.explains,
        asked.prefix,
        asked.retention,
        asked.grammar_field,
    )


def _read_for_vllm(question: ReadBody, body: bytes) -> BodyPasses | BodyLoads | None:
    if not any(model.is_vllm for model in question.models):
        return None
    salt_of = salt_maker(ApiTenant("", question.salt), has_keys=question.has_keys)
    read_for_vllm = OLLAMA_KINDS.get(question.kind) or reader_for(question.kind)
    return read_for_vllm(body, question.models, salt_of)


def _refused(error: HttpError) -> BodyRefused:
    return BodyRefused(error.status, error.sentence, error.code, error.parameter, error.headers)


def main(arguments: Sequence[str]) -> None:
    step_back(_NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    with socket.socket(fileno=int(arguments[0])) as sock, sock.makefile("rb") as questions:
        while head := questions.read(LENGTH_BYTES):
            gc.disable()  # collecting while millions of small lists are created would take longer than reading
            question = decode_question(questions.read(length_of(head)))
            reply = read(question, questions.read(question.num_bytes))
            for part in framed(reply):
                sock.sendall(part)
            del reply
            gc.enable()


if __name__ == "__main__":
    main(sys.argv[1:])
