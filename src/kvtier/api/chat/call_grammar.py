"""Grammars for answers with tool calls: for calls that are required, and for arguments that must follow a schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.api.chat.lark import Lark
from kvtier.api.chat.text_limits import check_parameters
from kvtier.api.chat.tool import Tool
from kvtier.api.chat.tool_formats.tool_format import ToolFormat
from kvtier.engine.grammar import Grammar
from kvtier.engine.thinking_marks import THOUGHT_BEGIN, THOUGHT_END

_FEW_SPACES = r"/[ \n]{0,4}/"
"""White space before and after reasoning: some models begin it on a line of its own."""


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What an answer may contain after its reasoning.

    An answer may have calls of `tools` in `tool_format`, if there is a format, and text that follows `output`, or any
    text if that is None. With `must_call` it may only have calls. `special_tokens` maps texts of special tokens to ids.
    """

    tool_format: ToolFormat | None
    tools: Sequence[Tool]
    must_call: bool
    allows_several: bool
    output: Grammar | None
    special_tokens: dict[str, int]
    forbids_others: bool = False
    """The prompt has further tools, which must not be called."""

    @property
    def is_free(self) -> bool:
        """Whether any answer is allowed."""
        if self.must_call or self.output is not None:
            return False
        return not self._callable or not (self.forbids_others or any(tool.is_strict for tool in self._callable))

    def grammar(self, *, may_think: bool) -> Grammar | None:
        """The grammar of an answer; None if any answer is allowed."""
        if self.is_free:
            return None
        if not may_think and not self._callable:
            return self.output
        lark = Lark(self.special_tokens)
        answer = self._answer(lark, may_think=may_think)
        if may_think:
            spaces = lark.terminal(_FEW_SPACES)
            thought = f"{spaces} {lark.literal(THOUGHT_BEGIN)} {lark.until(THOUGHT_END)}"
            answer = f"({thought})? {spaces} {lark.rule(answer)}"
        return lark.grammar(answer)

    def grammar_in_thought(self) -> Grammar | None:
        """The grammar of an answer that begins inside its reasoning, since the prompt opens it."""
        if self.is_free:
            return None
        lark = Lark(self.special_tokens)
        answer = lark.rule(self._answer(lark, may_think=True))
        return lark.grammar(f"{lark.until(THOUGHT_END)} {lark.terminal(_FEW_SPACES)} {answer}")

    @property
    def _callable(self) -> Sequence[Tool]:
        return () if self.tool_format is None else self.tools

    def _answer(self, lark: Lark, *, may_think: bool) -> str:
        if self.tool_format is None:
            assert self.output is not None, "a grammar without calls has an output"
            return lark.grammar_inside(self.output, is_spaced=False)
        calls = _Calls(lark, self.tool_format, self.tools, allows_several=self.allows_several)
        if self.must_call:
            return calls.only()
        if self.output is None:
            return calls.and_text(is_after_thought=may_think)
        return f"{calls.only()} | {lark.grammar_inside(self.output, is_spaced=True)}"


class _Calls:
    def __init__(self, lark: Lark, tool_format: ToolFormat, tools: Sequence[Tool], *, allows_several: bool) -> None:
        self._lark = lark
        self._format = tool_format
        self._tools = list(tools)
        self._allows_several = allows_several
        self._one = lark.rule(" | ".join(self._call(tool) for tool in tools))

    def only(self) -> str:
        """One call, or several."""
        lark, written = self._lark, self._format
        if not self._allows_several:
            return f"{lark.literal(written.mark)} {self._group()}"
        if not written.repeats_mark:
            return f"{lark.literal(written.mark)} {self._group()}"
        again = f"{lark.literal(written.between + written.mark)} {self._group()}"
        return f"{lark.literal(written.mark)} {self._group()} ({again})*"

    def and_text(self, *, is_after_thought: bool) -> str:
        """Any text, with calls in it. Reasoning before the text is not part of it, nor is the white space between."""
        lark, written = self._lark, self._format
        if not written.mark:
            pattern = written.other_text(self._tools)
            if is_after_thought:
                pattern += rf" & ~/(\s|{THOUGHT_BEGIN})(?s:.*)/"
            return f"{self.only()} | {lark.terminal(pattern)}"
        times = "*" if self._allows_several else "?"
        return f"({lark.until(written.mark)} {self._group()}){times} {lark.any_text()}"

    def _group(self) -> str:
        """The grammar after a marker: one call, or all of them."""
        lark, written = self._lark, self._format
        calls = self._one
        if self._allows_several and not written.repeats_mark:
            calls = f"{self._one} ({lark.literal(written.between)} {self._one})*"
        return written.group(lark, calls)

    def _call(self, tool: Tool) -> str:
        check_parameters(tool)
        return self._format.call(self._lark, tool)
