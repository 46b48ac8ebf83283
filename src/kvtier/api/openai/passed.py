"""The bodies of OpenAI's API, and of the others under `/v1`, that go to vLLM as they are."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.api.body_messages import (
    DETOKENIZE,
    OPENAI_CHAT,
    OPENAI_COMPLETION,
    TOKENIZE,
    BodyPasses,
    ModelSnapshot,
)
from kvtier.api.engines import unknown_model
from kvtier.api.http_error import HttpError
from kvtier.api.vllm.bodies import (
    ReadForVllm,
    SaltOf,
    check_path,
    find_vllm,
    model_in_form,
    pass_on,
    read_fields,
    text_of,
)

KNOWN_PATHS = tuple(f"/v1/{name}" for name in ("embeddings", "score", "rerank", "chat/completions/batch"))
"""Of vLLM, counted one by one. All others under `/v1` are passed on, too, and counted together."""

FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_REFUSED_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_PATHS = {
    OPENAI_CHAT: "/v1/chat/completions",
    OPENAI_COMPLETION: "/v1/completions",
    TOKENIZE: "/tokenize",
    DETOKENIZE: "/detokenize",
}


def reader_for(kind: str) -> ReadForVllm:
    """Of bodies of this kind, or at this path."""
    path = _PATHS.get(kind, kind)

    def read(body: bytes, models: Sequence[ModelSnapshot], salt_of: SaltOf | None) -> BodyPasses | None:
        fields = read_fields(body)
        model = find_vllm(models, text_of(fields, "model"))
        return None if model is None else pass_on(fields, model, path, salt_of)

    return read


def read_form(body: bytes, path: str, models: Sequence[ModelSnapshot], salt_of: SaltOf | None) -> BodyPasses:
    """A form with a file in it. Raises a `HttpError`, or `UnknownModel`."""
    name = model_in_form(body)
    model = find_vllm(models, name)
    if model is None:
        raise unknown_here(name, path, models)
    check_path(path, "" if salt_of is None else salt_of(""))
    return BodyPasses(name or model, model, path, None, is_streamed=False, num_answers=1, keys=[])


def check_served(path: str) -> None:
    """Raises a `HttpError` for what changes the engine."""
    if path in _REFUSED_PATHS:
        raise HttpError(
            403, f"{path} changes the engine: give vLLM its adapters in the deployment's file", "unsupported"
        )


def unknown_here(name: str | None, path: str, models: Sequence[ModelSnapshot]) -> Exception:
    """Of a path that only vLLM serves."""
    if name is None:
        return HttpError(400, "model is missing", "missing_field", "model")
    if any(name in model.names for model in models):
        return HttpError(404, f"{path} is not served for {name}, which kvtier's own engine runs", "unknown_url")
    return unknown_model(name, ", ".join(model.name for model in models if model.is_vllm))
