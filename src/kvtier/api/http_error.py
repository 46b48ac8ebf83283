"""HTTP errors in a form that all APIs share: a status, a sentence, a code and the field; APIs encode them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.errors import (
    EngineAway,
    EngineStopped,
    InvalidGrammar,
    KvtierError,
    PromptTooLong,
    RequestError,
    UnknownModel,
)

REFUSAL = "kvtier.refusal"
"""Where a `scope` has the `HttpError` for a request that its connection refuses."""

NO_EMBEDDINGS = "embeddings are supported by models that run on vLLM only"


@dataclass(slots=True)
class HttpError(Exception):
    """Raised anywhere while a request is served. `code` is for programs; `parameter` is the field at fault."""

    status: int
    sentence: str
    code: str = ""
    parameter: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.sentence


class WrongKey(HttpError):
    """An unknown API key, which may be a guess."""


def http_error_of(error: KvtierError) -> HttpError:
    """Errors of the caller become 4xx; an engine that is away becomes 503 with `Retry-After`."""
    if isinstance(error, UnknownModel):
        return HttpError(404, str(error), "model_not_found", "model")
    if isinstance(error, PromptTooLong):
        return HttpError(400, str(error), "context_length_exceeded")
    if isinstance(error, InvalidGrammar):
        return HttpError(400, str(error), "invalid_value", error.field or None)
    if isinstance(error, RequestError):
        return HttpError(400, str(error), "invalid_value", _parameter_in(str(error)))
    if isinstance(error, EngineAway):
        return unavailable(str(error), error.retry_after_s)
    if isinstance(error, EngineStopped):
        return unavailable(str(error), EngineAway.retry_after_s)
    return HttpError(500, str(error), "internal_error")


def unavailable(sentence: str, retry_after_s: int = EngineAway.retry_after_s) -> HttpError:
    return HttpError(503, sentence, "unavailable", headers={"Retry-After": str(retry_after_s)})


def overloaded(sentence: str) -> HttpError:
    """The server has too much to do: the same request may succeed later."""
    headers = {"Retry-After": str(EngineAway.retry_after_s)}
    return HttpError(429, sentence, "rate_limit_exceeded", headers=headers)


def _parameter_in(sentence: str) -> str | None:
    """The parameter in a sentence: sentences about a sampling parameter begin with its name."""
    word, _, rest = sentence.partition(" ")
    return word if rest.startswith("must ") else None
