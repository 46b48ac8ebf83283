"""What readers of bodies share: fields for the callers' own records, and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.api.http_error import http_error_of
from kvtier.api.json_body import JsonBody
from kvtier.api.limits import MAX_METADATA, MAX_RECORD_CHARACTERS
from kvtier.api.prefixes.record import MAX_NAME_CHARACTERS
from kvtier.engine.sampling_params import SamplingParams
from kvtier.errors import InvalidParameter

_NORMAL = "medium"
_VERBOSITIES = ("low", _NORMAL, "high")


def check_texts(body: JsonBody, *names: str) -> None:
    """Check the type and length of texts that callers send for their own records and that change nothing."""
    for name in names:
        body.short_text(name, MAX_RECORD_CHARACTERS)


def check_cache_options(body: JsonBody) -> None:
    """Check `prompt_cache_options`: every prompt is cached. A prompt alone, without an answer, is not served."""
    options = body.inner("prompt_cache_options")
    if options is not None and options.flag("prewarm"):
        raise options.refuse("prewarm", "is true: ask for an answer of one token instead")


def read_verbosity(body: JsonBody) -> dict[str, object]:
    """`verbosity` as a value for the chat template: a hint, without effect if the template does not use it."""
    given = body.text("verbosity")
    if given is not None and given not in _VERBOSITIES:
        raise body.wrong("verbosity", f"one of {', '.join(_VERBOSITIES)}")
    return {} if given in (None, _NORMAL) else {"verbosity": given}


def read_metadata(body: JsonBody) -> dict[str, str]:
    metadata = body.value("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise body.wrong("metadata", f"an object of at most {MAX_METADATA} texts")
    for value in metadata.values():
        if not isinstance(value, str) or len(value) > MAX_RECORD_CHARACTERS:
            raise body.wrong("metadata", f"an object of texts of at most {MAX_RECORD_CHARACTERS} characters")
    return metadata


def read_prefix(body: JsonBody) -> str:
    """The name of the prefix before the conversation; empty without one.

    An empty name is refused: a client that lost the name would get an answer without the documents.
    """
    name = body.short_text("prefix", MAX_NAME_CHARACTERS)
    if name == "":
        raise body.wrong("prefix", "the name of a prefix")
    return name or ""


def sampling_params(values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> SamplingParams:
    """`names` maps parameters to the client's names, where these differ. Raises `HttpError`."""
    try:
        return SamplingParams(**values)
    except InvalidParameter as error:
        own, _, rest = str(error).partition(" ")
        raise http_error_of(InvalidParameter(f"{(names or {}).get(own, own)} {rest}")) from error
