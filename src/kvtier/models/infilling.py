"""Prompts for the text between two others, for models that were trained to fill in.

No checkpoint says how such a prompt is written, but each form has special tokens, which its tokenizer contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt, and the tokens that end the text to fill in, in addition to those that end every answer."""

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InfillForm:
    """Tokens before the first text, between both texts, and behind them; `ends` may follow an answer."""

    before: str
    between: str
    behind: str
    ends: tuple[str, ...] = ()

    def infill(self, tokenizer: Tokenizer, prefix: Sequence[int], suffix: Sequence[int]) -> Infill:
        before, between, behind = (tokenizer.added_token_id(one) for one in (self.before, self.between, self.behind))
        assert before is not None
        assert between is not None
        assert behind is not None
        token_ids = [*tokenizer.first_token_ids, before, *prefix, between, *suffix, behind]
        ends = (tokenizer.added_token_id(one) for one in self.ends)
        return Infill(token_ids, (before, between, behind, *(one for one in ends if one is not None)))


_REST_OF_QWEN = ("<|fim_pad|>", "<|endoftext|>", "<|repo_name|>", "<|file_sep|>")
_FORMS = (
    InfillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", _REST_OF_QWEN),
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>")),
    InfillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>",)),
    InfillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    InfillForm("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
)


def infill_form(tokenizer: Tokenizer) -> InfillForm | None:
    """The form of a model's prompts; None if it was not trained to fill in."""
    for form in _FORMS:
        if all(tokenizer.added_token_id(one) is not None for one in (form.before, form.between, form.behind)):
            return form
    return None
