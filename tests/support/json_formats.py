"""The formats that structured output enforces, checked as their standards say; jsonschema alone lacks some of them."""

from __future__ import annotations

import datetime
import re
from urllib.parse import urlsplit

import jsonschema

_DATE_TIME = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt](?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_DATE = re.compile(r"\d{4}-(\d{2})-(\d{2})", re.ASCII)
_TIME = re.compile(_DATE_TIME.pattern.partition("[Tt]")[2], re.ASCII)
_DURATION = re.compile(
    r"P(?:\d+W|(?=\d|T\d)(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?=\d)(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)?)?)",
    re.ASCII,
)
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?", re.ASCII)
_URI_CHARACTERS = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*", re.ASCII)


def format_checker() -> jsonschema.FormatChecker:
    """jsonschema's own checks, with those that it has only beside other packages."""
    checker = jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))
    for name, check in (
        ("date", is_date),
        ("date-time", is_date_time),
        ("time", is_time),
        ("duration", is_duration),
        ("hostname", is_hostname),
        ("uri", is_uri),
    ):
        checker.checks(name)(check)
    return checker


def is_date_time(value: object) -> bool:
    """RFC 3339."""
    if not isinstance(value, str):
        return True
    found = _DATE_TIME.fullmatch(value)
    return found is not None and is_date(found[1])


def is_time(value: object) -> bool:
    """RFC 3339's full-time."""
    return not isinstance(value, str) or _TIME.fullmatch(value) is not None


def is_duration(value: object) -> bool:
    """RFC 3339, appendix A."""
    return not isinstance(value, str) or _DURATION.fullmatch(value) is not None


def is_hostname(value: object) -> bool:
    """RFC 1123: labels of letters, digits and inner hyphens."""
    if not isinstance(value, str):
        return True
    return len(value) <= 253 and all(_LABEL.fullmatch(label) for label in value.split("."))


def is_uri(value: object) -> bool:
    """RFC 3986: a scheme, and only characters that a URI may have."""
    if not isinstance(value, str):
        return True
    scheme, colon, _ = value.partition(":")
    if not (colon and _SCHEME.fullmatch(scheme) and _URI_CHARACTERS.fullmatch(value)):
        return False
    try:
        urlsplit(value)
    except ValueError:
        return False
    return True


def is_date(value: object) -> bool:
    """RFC 3339's full-date, but with 29 February in every year, as llguidance has it."""
    if not isinstance(value, str):
        return True
    found = _DATE.fullmatch(value)
    if found is None:
        return False
    try:
        datetime.date(2000, int(found[1]), int(found[2]))
    except ValueError:
        return False
    return True
