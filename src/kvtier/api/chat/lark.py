"""Builds grammars in llguidance's variant of Lark's syntax, rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from kvtier.api.chat.text_limits import TextLimits, choices_of, lark_regex
from kvtier.api.chat.tool import Tool, properties_of, types_of
from kvtier.engine.grammar import TEMPLATE_SPACING, Grammar, lark_inside, lark_text

ANY_TEXT = r"/(.|\n)*/"
_TOKEN_NAME = re.compile(r"<[^\s<>\[\]]+>")


class Lark:
    """The rules of a grammar. Texts for which the tokenizer has a special token are written as that token.

    JSON has the same white space as in chat templates, so a call in the history has the tokens that the model wrote.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: list[str] = []

    def grammar(self, start: str) -> Grammar:
        return Grammar("lark", "\n".join([f"start: {start}", *self._rules]))

    def literal(self, text: str) -> str:
        """Exactly this text."""
        marks = [mark for mark in self._special_tokens if mark and mark in text]
        if not marks:
            return lark_text(text) if text else ""
        parts = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", text)
        return " ".join(self._token(part) if part in marks else self.literal(part) for part in parts if part)

    def any_text(self) -> str:
        return self.terminal(ANY_TEXT)

    def until(self, mark: str) -> str:
        """Any text up to the first `mark`, and the mark itself."""
        if mark in self._special_tokens:
            return f"{self.any_text()} {self._token(mark)}"
        text = self.any_text()
        return self._add(f"rule_{len(self._rules)}", f"{text} {lark_text(mark)}", "[lazy]")

    def terminal(self, pattern: str) -> str:
        return self._add(f"TEXT_{len(self._rules)}", pattern)

    def rule(self, body: str) -> str:
        return self._add(f"rule_{len(self._rules)}", body)

    def json(self, schema: Mapping[str, object] | None) -> str:
        """A JSON object that follows a schema, or any object without one."""
        whole = {**(schema or {}), "type": "object", "x-guidance": TEMPLATE_SPACING}
        return self.rule("%json " + json.dumps(whole, ensure_ascii=False))

    def grammar_inside(self, grammar: Grammar, *, is_spaced: bool) -> str:
        """Another grammar as part of this one. With `is_spaced`, JSON has the same white space as in calls.

        Otherwise its white space is free, but then no alternative may begin with the same text: the white space decides
        which of them the text follows.
        """
        if grammar.kind == "json_schema":
            spacing = {"x-guidance": TEMPLATE_SPACING} if is_spaced else {}
            schema = json.loads(grammar.text)
            return self.rule("%json " + json.dumps({**schema, **spacing} if isinstance(schema, dict) else schema))
        if grammar.kind == "regex":
            return self._regex(grammar.text)
        return self.rule(lark_inside(grammar.text))

    def named_object(self, tool: Tool, key: str) -> str:
        """A JSON object with the tool's name and, under `key`, its arguments.

        It has one literal per JSON token, as in `%json`: otherwise an output that begins with the same text could not
        be told from a call.
        """
        words = ("{", '"name"', ": ", json.dumps(tool.name, ensure_ascii=False), ", ", f'"{key}"', ": ")
        head = " ".join(self.literal(word) for word in words)
        return f"{head} {self.json(tool.parameters)} {self.literal('}')}"

    def elements(self, tool: Tool, begin: str, end: str) -> str:
        """A tool's parameters in their schema's order, each between `begin`, which contains its name, and `end`."""
        schema = tool.parameters or {}
        required = schema.get("required")
        found = []
        for name, inner in properties_of(schema).items():
            value = self._element_value(tool, name, inner, end)
            element = f"{self.literal(begin.replace('{}', name))} {value}"
            is_required = isinstance(required, list) and name in required
            found.append(element if is_required else f"({element})?")
        return " ".join(found)

    def value(self, schema: Mapping[str, object], inner: object) -> str:
        """JSON that follows `inner`, the schema of one property of `schema`."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        whole = {**(inner if isinstance(inner, dict) else {}), **shared, "x-guidance": TEMPLATE_SPACING}
        return self.rule("%json " + json.dumps(whole, ensure_ascii=False))

    def _element_value(self, tool: Tool, name: str, inner: object, end: str) -> str:
        if tool.pattern:
            return f"{self._regex(tool.pattern)} {self.literal(end)}"
        if "string" not in types_of(inner):
            return f"{self.value(tool.parameters or {}, inner)} {self.literal(end)}"
        limits = TextLimits(tool, name, end.strip())
        choices = choices_of(inner)
        if choices is not None:
            limits.check_choices(choices)
            words = " | ".join(self.literal(one) for one in choices if one)
            return f"{f'({words})' if words else ''}{'?' if words and '' in choices else ''} {self.literal(end)}"
        limited = limits.terminal(inner)
        places = [end.find(mark) for mark in self._special_tokens if mark and mark in end]
        if not (limited or places):
            return self.until(end)
        text = self.terminal(limited) if limited else self.any_text()
        before = end[: min(places)] if places else end
        value = self.terminal(f"{text} {lark_text(before)}") if before else text
        return f"{value} {self.literal(end[len(before) :])}"

    def _regex(self, pattern: str) -> str:
        return self.terminal(lark_regex(pattern))

    def _token(self, mark: str) -> str:
        """A special token by its name, or by its id if the syntax does not allow that name."""
        return mark if _TOKEN_NAME.fullmatch(mark) else f"<[{self._special_tokens[mark]}]>"

    def _add(self, name: str, body: str, options: str = "") -> str:
        self._rules.append(f"{name}{options}: {body}")
        return name
