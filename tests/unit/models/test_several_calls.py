"""Templates that refuse an assistant's message with several calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.models.several_calls import takes_several_calls
from kvtier.models.tokenizer import Tokenizer
from kvtier.testing.tiny_models import make_tiny_tokenizer
from tests.support.chat_templates import ONE_CALL, TEMPLATES, WITHOUT_TOOLS


@pytest.mark.parametrize(
    ("template", "takes_several"),
    [
        *((template, True) for template in TEMPLATES.values()),
        (ONE_CALL, False),
        (WITHOUT_TOOLS, True),
        ("{{ raise_exception('no calls at all') }}", True),
        ("", True),
    ],
    ids=[*TEMPLATES, "one call", "without tools", "no calls", "no template"],
)
def test_a_template_is_asked_whether_it_takes_several_calls(tmp_path: Path, template: str, takes_several: bool) -> None:
    inner = make_tiny_tokenizer()
    inner.chat_template = template or None
    inner.save_pretrained(tmp_path)

    assert takes_several_calls(Tokenizer(tmp_path)) is takes_several


def test_a_template_of_its_own_for_tools_is_the_one_that_is_asked(tmp_path: Path) -> None:
    inner = make_tiny_tokenizer()
    inner.chat_template = {"default": TEMPLATES["llama3_json"], "tool_use": ONE_CALL}
    inner.save_pretrained(tmp_path)

    assert not takes_several_calls(Tokenizer(tmp_path))


def test_a_model_without_a_tokenizer_takes_what_comes(tmp_path: Path) -> None:
    assert takes_several_calls(None)
    assert takes_several_calls(Tokenizer(tmp_path))
