"""Reads `context_management`: edits that shorten a long prompt.

Agents send this field on their own. Prompts are never shortened here: edits that only apply to prompts beyond some
length are accepted, and the answer says that none was applied. Edits that apply to every prompt are refused.
"""

from __future__ import annotations

from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_CONTEXT_EDITS
from kvtier.api.neutral_fields import invalid

_OF_LONG_PROMPTS = ("clear_tool_uses_", "compact_")
_CLEAR_THINKING = "clear_thinking_"
_ALL = "all"


def read_context_edits(body: JsonBody) -> bool:
    """Whether the answer must list the applied edits. Raises `HttpError` for an edit that is not supported."""
    given = body.inner("context_management")
    if given is None:
        return False
    for index, edit in enumerate(given.items("edits", MAX_CONTEXT_EDITS) or ()):
        _check(edit, f"context_management.edits[{index}]")
    given.refuse_rest()
    return True


def _check(edit: object, path: str) -> None:
    if not isinstance(edit, dict):
        raise invalid(path, f"{path} must be an object, not {shown(edit)}")
    body = JsonBody(edit, f"{path}.")
    kind = body.needed_text("type")
    if kind.startswith(_OF_LONG_PROMPTS):
        return
    if not kind.startswith(_CLEAR_THINKING):
        raise HttpError(400, f"{path}.type is {shown(kind)}, which is not supported here", "invalid_value", path)
    keep = body.value("keep")
    if (keep.get("type") if isinstance(keep, dict) else keep) != _ALL:
        raise body.refuse("keep", f"must be {_ALL}: the model's chat template alone decides which thinking is kept")
