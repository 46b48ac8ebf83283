"""Chat templates in the style of each family of models, in words of our own, and what they make of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2

END: Final = "<|end|>\n"
"""Template text of every turn."""

_HEAD = """
{%- if tools -%}
<|system|>{{ "\\n" }}These tools are there:{{ "\\n" }}
{%- for tool in tools -%}{{ tool | tojson }}{{ "\\n" }}{%- endfor -%}
{{ how }}<|end|>{{ "\\n" }}
{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ "\\n" }}
"""
_TAIL = """
<|end|>{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{ "\\n" }}{%- endif -%}
"""
_THOUGHT = """
{%- if message.reasoning_content -%}
<think>{{ "\\n" + message.reasoning_content + "\\n" }}</think>{{ "\\n\\n" }}
{%- endif -%}
"""
_NO_THOUGHT = """
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking -%}
<think>{{ "\\n\\n" }}</think>{{ "\\n\\n" }}
{%- endif -%}
"""
_OPEN_THOUGHT = """
{%- if add_generation_prompt -%}<think>{{ "\\n" }}{%- endif -%}
"""


def _calls(before: str, each: str, after: str = "", between: str = "") -> str:
    """Content and calls of a message."""
    return (
        '{{- message.content -}}{%- if message.tool_calls -%}{%- if message.content -%}{{ "'
        + between
        + '" }}{%- endif -%}'
        + before
        + "{%- for one in message.tool_calls -%}{%- set call = one.function -%}"
        + each
        + "{%- endfor -%}"
        + after
        + "{%- endif -%}"
    )


def _object(key: str) -> str:
    return '{"name": {{ call.name | tojson }}, "' + key + '": {{ call.arguments | tojson }}}'


_NEXT_LINE = '{%- if not loop.last -%}{{ "\\n" }}{%- endif -%}'
_HERMES = _calls(
    "", '<tool_call>{{ "\\n" }}' + _object("arguments") + '{{ "\\n" }}</tool_call>' + _NEXT_LINE, "", "\\n"
)
_QWEN_CODER = _calls(
    "",
    '<tool_call>{{ "\\n" }}<function={{ call.name }}>{{ "\\n" }}'
    "{%- for key, value in call.arguments.items() -%}"
    '<parameter={{ key }}>{{ "\\n" }}{{ value if value is string else value | tojson }}'
    '{{ "\\n" }}</parameter>{{ "\\n" }}'
    '{%- endfor -%}</function>{{ "\\n" }}</tool_call>' + _NEXT_LINE,
    "",
    "\\n",
)
_GLM45 = _calls(
    "",
    '<tool_call>{{ call.name + "\\n" }}'
    "{%- for key, value in call.arguments.items() -%}"
    '<arg_key>{{ key }}</arg_key>{{ "\\n" }}<arg_value>{{ value if value is string else value | tojson }}</arg_value>'
    '{{ "\\n" }}{%- endfor -%}</tool_call>' + _NEXT_LINE,
    "",
    "\\n",
)
_GLM4 = "{#- [gMASK] <|observation|> -#}" + _calls(
    "", '{{ call.name + "\\n" }}{{ call.arguments | tojson }}' + _NEXT_LINE
)
_LLAMA = '{#- {"name": ..., "parameters": ...} ipython -#}' + _calls(
    "", _object("parameters") + "{%- if not loop.last -%}; {% endif -%}"
)
_PYTHONIC = _calls(
    "<|python_start|>[",
    "{{ call.name }}({%- for key, value in call.arguments.items() -%}"
    "{{ key }}={{ value | tojson }}{%- if not loop.last -%}, {% endif -%}"
    "{%- endfor -%}){%- if not loop.last -%}, {% endif -%}",
    "]<|python_end|>",
)
_MISTRAL = _calls("[TOOL_CALLS] [", _object("arguments") + "{%- if not loop.last -%}, {% endif -%}", "]")
_MISTRAL_ARGS = _calls("", "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}")

TEMPLATES: Final[Mapping[str, str]] = {
    name: _HEAD + calls + _TAIL
    for name, calls in {
        "hermes": _HERMES,
        "qwen3_coder": _QWEN_CODER,
        "glm45": _GLM45,
        "glm4": _GLM4,
        "llama3_json": _LLAMA,
        "llama4_pythonic": _PYTHONIC,
        "mistral": _MISTRAL,
        "mistral_args": _MISTRAL_ARGS,
    }.items()
}
"""By the names of the formats in which they write calls."""

THINKING: Final = _HEAD + _THOUGHT + _HERMES + _TAIL + _NO_THOUGHT
"""A model that thinks, and calls as Hermes. `enable_thinking: false` turns it off."""

ALWAYS_THINKING: Final = _HEAD + _THOUGHT + _HERMES + _TAIL + _OPEN_THOUGHT
"""Every answer begins inside of a thought."""

ONE_CALL: Final = (
    "{%- for message in messages if message.tool_calls and message.tool_calls | length != 1 -%}"
    "{{ raise_exception('one call and no more in each message') }}{%- endfor -%}" + TEMPLATES["llama3_json"]
)
"""Its model calls one tool at a time, as Llama 3.2."""

WITHOUT_TOOLS: Final = "{%- for message in messages -%}" + "{{ message.content }}" + _TAIL


def render(template: str, messages: Sequence[Mapping[str, Any]], *, is_asked: bool = False, **values: object) -> str:
    """Renders like the engine's tokenizer; with `is_asked`, up to the beginning of the answer."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(messages=messages, add_generation_prompt=is_asked, **values)


def answer_text(
    template: str, calls: Sequence[tuple[str, Mapping[str, object]]], text: str = "", reasoning: str = ""
) -> str:
    """The text of a model that gives this answer, by its template."""
    user = {"role": "user", "content": "go"}
    assistant: dict[str, object] = {"role": "assistant", "content": text}
    if reasoning:
        assistant["reasoning_content"] = reasoning
    if calls:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        assistant["tool_calls"] = [{"id": "123456789", "type": "function", "function": one} for one in functions]
    whole = render(template, [user, assistant])
    return whole.removeprefix(render(template, [user], is_asked=True)).removesuffix(END)
