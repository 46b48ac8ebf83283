"""Reads from a body for vLLM what the HTTP server needs: the model, limits and salt. vLLM checks all the rest.

Only the outermost fields are decoded. A body is passed on byte for byte, unless a salt must be added: then all other
fields keep their bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvtier.api.body_messages import OPENAI_RESPONSE, BodyLoads, BodyPasses, ModelSnapshot
from kvtier.api.http_error import HttpError
from kvtier.api.limits import MAX_ANSWERS, MAX_CACHE_SALT_CHARACTERS, MAX_MESSAGES, MAX_PROMPTS
from kvtier.api.vllm.prefix_keys import prefix_keys

Fields = Mapping[str, msgspec.Raw]
SaltOf = Callable[[str], str]
ReadForVllm = Callable[[bytes, Sequence[ModelSnapshot], SaltOf | None], BodyPasses | BodyLoads | None]
"""Reads a body, given the served models and the function that makes its salt; None if its model is not vLLM's."""

SALTED_PATHS = frozenset(
    f"/v1/{name}"
    for name in (
        "chat/completions",
        "chat/completions/batch",
        "completions",
        "responses",
        "messages",
        "embeddings",
        "score",
        "rerank",
    )
)
"""Paths whose bodies have a `cache_salt`."""

_WITHOUT_KV = re.compile(r"/v1/(?:messages/count_tokens|[a-z/]+/(?:render|derender))|/(?:de)?tokenize")
"""Paths that compute no KV, and so share none."""

_REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_MAX_N = 128
_MAX_NAME_CHARACTERS = 1024
_FORM_MODEL = re.compile(rb'name="?model"?[;\r]')
_MAX_FORM_FIELDS = 16
_FORM_HEAD_BYTES = 1024
_FORM_BYTES_AT_ENDS = 1 << 20
_END_OF_FORM_HEAD = b"\r\n\r\n"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_values = msgspec.json.Decoder()
_items = msgspec.json.Decoder(list[msgspec.Raw])


def read_fields(body: bytes) -> Fields:
    """Raises `HttpError` if the body is not a JSON object."""
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise HttpError(400, f"the body is not a JSON object: {error}", "invalid_json") from error
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply", "invalid_json") from error


def find_vllm(models: Sequence[ModelSnapshot], name: str | None) -> str | None:
    """The main name of vLLM's model with this name. Without a name: the deployment's only model, if vLLM runs it."""
    if name is None:
        return models[0].name if len(models) == 1 and models[0].is_vllm else None
    return next((model.name for model in models if model.is_vllm and name in model.names), None)


def text_of(fields: Fields, name: str) -> str | None:
    """The value of a field that is text, else None."""
    raw = bytes(fields.get(name, b""))
    if raw[:1] != b'"':
        return None
    try:
        found = _values.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"{name} is not valid text", "invalid_value", name) from error
    return found if isinstance(found, str) else None


def model_in_form(body: bytes) -> str | None:
    """The field `model` of a form, searched at both ends: it is before or after the file."""
    for part in (body[:_FORM_BYTES_AT_ENDS], body[-_FORM_BYTES_AT_ENDS:]):
        for found in itertools.islice(_FORM_MODEL.finditer(part), _MAX_FORM_FIELDS):
            head_end = part.find(_END_OF_FORM_HEAD, found.start(), found.start() + _FORM_HEAD_BYTES)
            start = head_end + len(_END_OF_FORM_HEAD)
            end = part.find(b"\r\n", start, start + _MAX_NAME_CHARACTERS + 2)
            if head_end >= 0 and end > start:
                return part[start:end].decode(errors="replace")
    return None


def check_path(path: str, salt: str) -> None:
    """Raises `HttpError` for a path where requests with this `salt` would share blocks with others."""
    if salt and path not in SALTED_PATHS and not _WITHOUT_KV.fullmatch(path):
        sentence = f"{path} cannot keep the blocks of API keys apart: only keys with share: true may use it"
        raise HttpError(403, sentence, "unsupported_with_salt")


def pass_on(fields: Fields, model: str, path: str, salt_of: SaltOf | None, *, body: bytes | None = None) -> BodyPasses:
    """A body for the model whose main name is `model`; `body` replaces the client's bytes if it is given.

    `salt_of` makes the salt to send from the body's own; without keys it is None, and the body's own is sent.
    Raises `HttpError` for a field that is not supported, or over its limit.
    """
    merged = _merged_by_vllm(fields)
    for name in _REFUSED_FIELDS:
        if bytes(fields.get(name, b"null")) != b"null" or name in merged:
            sentence = f"{name} is not supported here: kvtier decides what is loaded and stored"
            raise HttpError(400, sentence, "unsupported_parameter", name)
    if bytes(fields.get("prefix", b"null")) != b"null":
        sentence = "prefix is not supported here: prefixes of models that vLLM runs cannot be warmed"
        raise HttpError(400, sentence, "unsupported_parameter", "prefix")
    previous = ""
    if path == OPENAI_RESPONSE:
        _check_request_id(fields, has_keys=salt_of is not None)
        previous = text_of(fields, "previous_response_id") or ""
    own_salt = _own_salt(fields)
    salt = own_salt if salt_of is None else salt_of(own_salt)
    check_path(path, "" if salt_of is None else salt)
    if salt_of is not None and salt != own_salt:
        fields = {**fields, "cache_salt": msgspec.Raw(msgspec.json.encode(_digest(salt)))}
        body = msgspec.json.encode(fields)
    return BodyPasses(
        name=text_of(fields, "model") or model,
        model=model,
        path=path,
        body=body,
        is_streamed=bytes(fields.get("stream", b"")) == b"true",
        num_answers=_num_answers(fields),
        keys=[] if previous else prefix_keys(fields, salt),  # its prompt begins with what only the engine has
        previous=previous,
    )


def _merged_by_vllm(fields: Fields) -> Fields:
    """Fields that vLLM takes as if they were the body's own; none if vLLM refuses them."""
    try:
        return _fields.decode(fields.get("vllm_xargs", b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        return {}


def _check_request_id(fields: Fields, *, has_keys: bool) -> None:
    """It would be the response's id: with keys, nobody chooses an id that another key's response may have."""
    if has_keys and bytes(fields.get("request_id", b"null")) != b"null":
        raise HttpError(400, "request_id is not supported here: vLLM chooses it", "unsupported_parameter", "request_id")


def _own_salt(fields: Fields) -> str:
    raw = bytes(fields.get("cache_salt", b"null"))
    if raw == b"null":
        return ""
    found = text_of(fields, "cache_salt")
    if not found or len(found) > MAX_CACHE_SALT_CHARACTERS:
        sentence = f"cache_salt must be text of 1 to {MAX_CACHE_SALT_CHARACTERS} characters"
        raise HttpError(400, sentence, "invalid_value", "cache_salt")
    return found


def _digest(salt: str) -> str:
    """vLLM's salts are short, without special characters. Clients cannot forge a digest: their salts are digested."""
    return hashlib.sha256(salt.encode(errors="replace")).hexdigest()


def _num_answers(fields: Fields) -> int:
    """The number of answers. Raises `HttpError` if a limit is exceeded."""
    num_messages = _num_items(fields, "messages")
    if num_messages > MAX_MESSAGES:
        raise HttpError(400, f"messages must not be more than {MAX_MESSAGES}, but is {num_messages}", "invalid_value")
    n = _whole(fields, "n")
    if n > _MAX_N:
        raise HttpError(400, f"n must not be more than {_MAX_N}, but is {n}", "invalid_value", "n")
    num_prompts = max(1, _num_items(fields, "prompt"))
    if num_prompts > MAX_PROMPTS or num_prompts * n > MAX_ANSWERS:
        sentence = f"prompt and n must not make more than {MAX_ANSWERS} answers, but make {num_prompts * n}"
        raise HttpError(400, sentence, "invalid_value", "prompt")
    return num_prompts * n


def _whole(fields: Fields, name: str) -> int:
    raw = bytes(fields.get(name, b""))
    return max(1, int(raw)) if raw.isdigit() and len(raw) < 20 else 1


def _num_items(fields: Fields, name: str) -> int:
    """The length of a list of texts, objects or lists; 0 for other values, such as a list of token ids."""
    raw = bytes(fields.get(name, b""))
    if raw[:1] != b"[" or raw[1:].lstrip()[:1] not in (b'"', b"[", b"{"):
        return 0
    try:
        return len(_items.decode(raw))
    except msgspec.DecodeError as error:
        raise HttpError(400, f"the body is not a JSON object: {error}", "invalid_json") from error
