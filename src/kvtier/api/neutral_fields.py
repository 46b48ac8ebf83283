"""Fields that are not supported: values with which they change nothing are accepted, others are refused."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody, shown

Neutral = Mapping[str, tuple[object, ...]]
"""Field names, with the values, if any, with which a field changes nothing."""


def refuse_others(body: JsonBody, neutral: Neutral) -> None:
    """Raises `HttpError` for a field with a value that would change something."""
    for name, values in neutral.items():
        found = body.value(name)
        if found is not None and not any(type(found) is type(value) and found == value for value in values):
            except_as = f", except as {' or '.join(shown(value) for value in values)}" if values else ""
            raise body.refuse(name, f"is not supported here{except_as}")


def image_refused(path: str) -> HttpError:
    return HttpError(400, f"{path} is an image, and models here read text only", "unsupported_parameter", path)


def invalid(parameter: str, sentence: str) -> HttpError:
    return HttpError(400, sentence, "invalid_value", parameter)
