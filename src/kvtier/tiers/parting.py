"""Where a prompt parts from one that an engine has recorded, and the likely cause. Values only: safe on any thread.

An engine makes one `Parting` per prompt (`engine/parting`); answers carry it on request, and `kvtier explain` prints
it. It contains text only if the deployment allows that.
"""

from __future__ import annotations

import enum

import msgspec


class How(enum.Enum):
    """How a prompt relates to the recorded one that shares most of its beginning."""

    NOTHING_RECORDED = "nothing_recorded"
    CONTINUED = "continued"
    REPEATED = "repeated"
    PARTED = "parted"


class Cause(enum.Enum):
    """What differs behind the common beginning, as far as this is recognised."""

    TEMPLATE_DATE = "template_date"
    DATE = "date"
    ID = "id"
    NUMBER = "number"
    HEADER = "header"
    TOOLS_REORDERED = "tools_reordered"
    TOOL_KEYS_REORDERED = "tool_keys_reordered"
    TOOLS_CHANGED = "tools_changed"
    REASONING = "reasoning"
    SAME_TEXT = "same_text"


_ADVICE = {
    Cause.TEMPLATE_DATE: (
        "The model's chat template writes the current date: give the date in chat_template_kwargs (date_string, if the "
        "template knows that name), or use a template without strftime_now."
    ),
    Cause.DATE: "A date or time changes: put it into the last message, behind the text that stays the same.",
    Cause.ID: "An id changes: leave it out of the prompt, or put it behind the text that stays the same.",
    Cause.NUMBER: "A number changes: if it is a counter, put it behind the text that stays the same.",
    Cause.HEADER: "A header line changes: strip such lines before the prompt is sent.",
    Cause.TOOLS_REORDERED: "The same tools came in another order: always send them in one order, such as by name.",
    Cause.TOOL_KEYS_REORDERED: "The keys of a tool came in another order: encode tools with a fixed order of keys.",
    Cause.TOOLS_CHANGED: "The set of tools changed: keep it for a whole session, and choose with tool_choice.",
    Cause.REASONING: (
        "The history lacks the reasoning of an earlier answer: send it back as reasoning_content, if the model's "
        "template keeps it."
    ),
    Cause.SAME_TEXT: (
        "The text is the same, but the model generated it as other tokens than the tokenizer makes of it: only prompts "
        "of token ids avoid that."
    ),
}


class Parting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt of `prompt_tokens` has its first `token` tokens in common with a recorded one of `recorded_tokens`.

    The recorded prompt is of the same tenant, and of the same session if `same_session`. It includes its answer:
    `in_answer` says that the common beginning ends there. `message` is the number, from 1, of the message with the
    first token that differs, and `role` its role; None if unknown. `before`, `recorded` and `now` are text around that
    place. `each_time` says that prompt after prompt parts near its head.
    """

    how: How
    token: int
    prompt_tokens: int
    recorded_tokens: int = 0
    same_session: bool = False
    in_answer: bool = False
    message: int | None = None
    role: str = ""
    before: str = ""
    recorded: str = ""
    now: str = ""
    causes: list[Cause] = []
    each_time: bool = False

    def sentence(self) -> str:
        """The parting in one sentence, for people."""
        if self.how is How.NOTHING_RECORDED:
            return "No prompt is recorded to compare this one with."
        other = "an earlier prompt of its session" if self.same_session else "a recorded prompt"
        if self.how is How.CONTINUED:
            return f"The prompt continues {other}, all {self.token} tokens of it."
        if self.how is How.REPEATED:
            return f"All {self.token} tokens of the prompt are the beginning of {other}."
        if self.token == 0:
            return f"The prompt has no beginning in common with {other}{self._place(': ')}."
        place = f", in its answer{self._place(': ')}" if self.in_answer else self._place(", in ")
        return f"The prompt parts from {other} at token {self.token}{place}."

    def without_text(self) -> Parting:
        """The same without text, for a deployment that does not allow it."""
        return msgspec.structs.replace(self, before="", recorded="", now="")

    def advice(self) -> list[str]:
        """A sentence for each of the causes."""
        found = [_ADVICE[cause] for cause in self.causes]
        if self.each_time:
            found.insert(0, "The head changes with each prompt, so nothing behind it can be reused.")
        return found

    def _place(self, link: str) -> str:
        """The message, after `link`, and the text, as far as they are known."""
        role = f" ({self.role})" if self.role else ""
        message = "" if self.message is None else f"{link}message {self.message}{role}"
        text = f": cached {self.recorded!r}, now {self.now!r}" if self.recorded or self.now else ""
        return message + text
