"""Regular expressions for the known values of a schema's `format`. None of them allows `<` or a new line."""

from __future__ import annotations

from typing import Final

_DATE = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
)
_HOURS_MINUTES = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS_MINUTES}:(?:[0-5][0-9]|60)(?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOURS_MINUTES})"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_SECONDS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    """Eight groups; or up to seven, with `::` for those that are missing."""
    found = [f"{_HEX}(?::{_HEX}){{7}}"]
    for before in range(8):
        head = f"{_HEX}(?::{_HEX}){{{before - 1}}}" if before else ""
        tail = f"(?:{_HEX}(?::{_HEX}){{0,{6 - before}}})?" if before < 7 else ""
        found.append(f"{head}::{tail}")
    return "|".join(found)


_COMMON = r"[A-Za-z0-9._~!$&'()*+,;=\-]|%[0-9A-Fa-f]{2}"
_IN_PATH = f"(?:{_COMMON}|[:@])"
_AFTER_PATH = f"(?:{_COMMON}|[:@/?])*"
_AUTHORITY = rf"(?:(?:{_COMMON}|:)*@)?(?:\[(?:{_ipv6()})\]|(?:{_COMMON})*)(?::[0-9]{{0,5}})?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.\-]*:(?://{_AUTHORITY}(?:/{_IN_PATH}*)*|/?(?:{_IN_PATH}+(?:/{_IN_PATH}*)*)?)"
    rf"(?:\?{_AFTER_PATH})?(?:#{_AFTER_PATH})?"
)

TEXT_FORMATS: Final = {
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P(?:{_DAYS}(?:{_SECONDS})?|{_SECONDS}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uri": _URI,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
