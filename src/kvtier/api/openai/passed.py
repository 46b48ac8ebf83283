"""Bodies of OpenAI's API, and of other paths under `/v1`, that are passed on to vLLM unchanged."""

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
"""Paths of vLLM with metrics of their own. All other paths under `/v1` are passed on, too, and counted together."""

FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_REFUSED_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_PATHS = {
    OPENAI_CHAT: "/v1/chat/completions",
    OPENAI_COMPLETION: "/v1/completions",
    TOKENIZE: "/tokenize",
    DETOKENIZE: "/detokenize",
}


def reader_for(kind: str) -> ReadForVllm:
    """A reader for bodies of this kind, or for bodies sent to this path."""
    path = _PATHS.get(kind, kind)

    def read(body: bytes, models: Sequence[ModelSnapshot], salt_of: SaltOf | None) -> BodyPasses | None:
        fields = read_fields(body)
        model = find_vllm(models, text_of(fields, "model"))
        return None if model is None else pass_on(fields, model, path, salt_of)

    return read


def read_form(body: bytes, path: str, models: Sequence[ModelSnapshot], salt_of: SaltOf | None) -> BodyPasses:
    """Read a form with a file in it. Raises `HttpError`, or `UnknownModel`."""
    name = model_in_form(body)
    model = find_vllm(models, name)
    if model is None:
        raise unknown_here(name, path, models)
    check_path(path, "" if salt_of is None else salt_of(""))
    return BodyPasses(name or model, model, path, None, is_streamed=False, num_answers=1, keys=[])


def check_served(path: str) -> None:
    """Raises `HttpError` for paths that change the engine."""
    if path in _REFUSED_PATHS:
        raise HttpError(
            403, f"{path} would change the engine: configure vLLM's adapters in the deployment file", "unsupported"
        )


def unknown_here(name: str | None, path: str, models: Sequence[ModelSnapshot]) -> Exception:
    """The error for a request to a path that only vLLM serves, if vLLM does not run the model."""
    if name is None:
        return HttpError(400, "model is missing", "missing_field", "model")
    if any(name in model.names for model in models):
        return HttpError(404, f"{path} is not available for {name}: kvtier's own engine runs it", "unknown_url")
    return unknown_model(name, ", ".join(model.name for model in models if model.is_vllm))
