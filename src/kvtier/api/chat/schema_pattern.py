"""Translates a schema's `pattern`, in JavaScript's syntax, to a regular expression of the whole text, for grammars."""

from __future__ import annotations

import re

_ESCAPE = r"\\(?:[dDwWsSnrtfv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{\w{1,40}(?:=\w{1,40})?\}|[!-/:-@\[-`{-~])"
_PART = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<set>\[\^?(?:{_ESCAPE}|[^\\\]])+\])|(?P<open>\((?:\?:|\?<[A-Za-z_]\w*>|(?!\?)))"
    r"|(?P<close>\))|(?P<bar>\|)|(?P<begin>\^)|(?P<end>\$)|(?P<times>(?:[*+?]|\{[0-9]{1,4}(?:,(?:[0-9]{1,4})?)?\})\??)"
    r"|(?P<any>\.)|(?P<text>[^\\\[(){|^$*+?.])",
    re.ASCII,
)
_MEMBER = re.compile(rf"{_ESCAPE}|[^\\]", re.ASCII)
_CLASS = re.compile(r"\\[dDwWsSpP]")
_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}
_ANY_LINE = r"[^\n\r\u2028\u2029]"
_ANYTHING = "(?s:.*)"
_OPERATORS = "[&~"
"""Characters that have a meaning inside a set for the library, and none in JavaScript."""


def whole_text(pattern: str) -> str:
    """The texts in which `pattern` is found: all of them, except for what `^` and `$` begin and end.

    Raises `ValueError`, with a reason, for what grammars cannot express: look-around, references, inner anchors.
    """
    found: list[str] = []
    body: list[str] = []
    depth = position = 0
    is_open = is_start = True
    has_end = has_atom = False

    def finish() -> None:
        found.append(f"{_ANYTHING if is_open else ''}(?:{''.join(body)}){'' if has_end else _ANYTHING}")

    while position < len(pattern):
        part = _PART.match(pattern, position)
        if part is None:
            raise ValueError(f"grammars do not support it at {pattern[position : position + 10]!r}")
        kind, text = str(part.lastgroup), part[0]
        position = part.end()
        if kind == "bar" and not depth:
            finish()
            body, is_open, has_end, has_atom, is_start = [], True, False, False, True
            continue
        if has_end or (kind == "begin" and not is_start) or (kind == "end" and depth):
            raise ValueError("it has ^ or $ elsewhere than at its beginning and end")
        if kind == "times" and not has_atom:
            raise ValueError(f"there is nothing that {text} could repeat")
        depth += {"open": 1, "close": -1}.get(kind, 0)
        if depth < 0:
            raise ValueError("its parentheses do not match")
        has_atom = kind in ("escape", "set", "close", "any", "text")
        is_start = False
        if kind == "begin":
            is_open = False
        elif kind == "end":
            has_end = True
        else:
            body.append(_written(kind, text))
    if depth:
        raise ValueError("its parentheses do not match")
    finish()
    return "|".join(found)


def _written(kind: str, text: str) -> str:
    if kind == "set":
        return _set(text)
    if kind == "any":
        return _ANY_LINE
    if kind == "open":
        return "(?:"
    if kind == "times":
        return text.removesuffix("?") if len(text) > 1 else text
    return f"[{_ASCII[text]}]" if text in _ASCII else text


def _set(text: str) -> str:
    begin = "[^" if text.startswith("[^") else "["
    inner = text[len(begin) : -1]
    if "--" in inner:
        raise ValueError("it has -- in a set of characters")
    members = _MEMBER.findall(inner)
    written = []
    for index, one in enumerate(members):
        around = (members[index - 1] if index else r"\d", members[index + 1] if index + 1 < len(members) else r"\d")
        if one in _OPERATORS or (one == "-" and any(_CLASS.match(other) for other in around)):
            written.append("\\" + one)
        else:
            written.append("\\^" if one == "^" else _ASCII.get(one, one))
    return f"{begin}{''.join(written)}]"
