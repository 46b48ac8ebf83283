"""Blocks that are text for the model: text itself, documents, search results, and names of tools."""

from __future__ import annotations

from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_PARTS
from kvtier.api.neutral_fields import image_refused, invalid

TEXT_BLOCKS = ("text", "document", "search_result", "tool_reference")


def text_of(body: JsonBody, path: str) -> str:
    """The text of a block. Raises `HttpError` for a block of another type."""
    kind = body.needed_text("type")
    if kind == "text":
        return body.needed_text("text")
    if kind == "document":
        return _document(body, path)
    if kind == "search_result":
        found = _parts(body, "content", path)
        return _marked("search_result", {"source": body.text("source"), "title": body.text("title")}, found)
    if kind == "tool_reference":
        return body.needed_text("tool_name")
    if kind == "image":
        raise image_refused(path)
    sentence = f"{path} is of type {shown(kind)}: only blocks with text are supported here"
    raise HttpError(400, sentence, "invalid_value", path)


def _document(body: JsonBody, path: str) -> str:
    citations = body.inner("citations")
    if citations is not None and citations.flag("enabled"):
        raise citations.refuse("enabled", "is true, but answers here have no citations")
    source = body.inner("source")
    if source is None:
        raise body.missing("source")
    kind = source.needed_text("type")
    if kind == "text":
        text = source.needed_text("data")
    elif kind == "content":
        text = _parts(source, "content", f"{path}.source")
    else:
        raise source.refuse("type", f"is {shown(kind)}: only text and content are supported here, which have the text")
    return _marked("document", {"title": body.text("title"), "context": body.text("context")}, text)


def _parts(body: JsonBody, name: str, path: str) -> str:
    given = body.value(name)
    if isinstance(given, str):
        return given
    texts = []
    for number, part in enumerate(body.items(name, MAX_PARTS) or ()):
        place = f"{path}.{name}[{number}]"
        if not isinstance(part, dict):
            raise invalid(place, f"{place} must be an object, not {shown(part)}")
        inner = JsonBody(part, f"{place}.")
        if part.get("type") == "image":
            raise image_refused(place)
        if inner.needed_text("type") != "text":
            raise inner.wrong("type", "text")
        texts.append(inner.needed_text("text"))
    return "".join(texts)


def _marked(name: str, heads: dict[str, str | None], text: str) -> str:
    """The text between marks: it is joined with the texts beside it."""
    lines = [f"<{head}>{value}</{head}>" for head, value in heads.items() if value]
    return "\n".join([f"<{name}>", *lines, text, f"</{name}>", ""])
