"""Tools of OpenAI's own that the client runs: a shell and patches of files, shown to the model as functions."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.api.chat.tool import Tool
from kvtier.api.json_body import JsonBody, shown
from kvtier.api.limits import MAX_SKILLS
from kvtier.api.neutral_fields import invalid

LOCAL_SHELL, SHELL, APPLY_PATCH = "local_shell", "shell", "apply_patch"
CLIENT_TOOLS = (LOCAL_SHELL, SHELL, APPLY_PATCH)
DELETE = "delete_file"
OPERATIONS = ("create_file", "update_file", DELETE)

_TEXT = {"type": "string"}
_WHOLE = {"type": "integer", "minimum": 0, "maximum": 1_000_000_000}
_TEXTS = {"type": "array", "items": _TEXT}
_DESCRIPTIONS = {
    LOCAL_SHELL: "Runs a command on the user's machine, and returns its output.",
    SHELL: "Runs shell commands on the user's machine, one after the other, and returns the output of each.",
    APPLY_PATCH: "Creates, updates or deletes a file. Lines of diff begin with a space if they stay, with - "
    "if they are removed, and with + if they are added; a line that begins with @@ names the place of a change. To "
    "create a file, all lines begin with +.",
}
_MEMBERS: Mapping[str, dict[str, object]] = {
    LOCAL_SHELL: {
        "command": {**_TEXTS, "description": "The program and its arguments."},
        "working_directory": _TEXT,
        "timeout_ms": _WHOLE,
    },
    SHELL: {"commands": _TEXTS, "timeout_ms": _WHOLE, "max_output_length": _WHOLE},
    APPLY_PATCH: {
        "type": {"type": "string", "enum": list(OPERATIONS)},
        "path": _TEXT,
        "diff": {**_TEXT, "description": f"Required, except to {DELETE}."},
    },
}
_REQUIRED = {LOCAL_SHELL: ["command"], SHELL: ["commands"], APPLY_PATCH: ["type", "path"]}
_NEUTRAL_CALLERS = ["direct"]


def read_client_tool(kind: str, body: JsonBody, given: Mapping[str, object]) -> Tool | None:
    """Read a tool of one of these kinds. None for a shell in a container of OpenAI's. Raises `HttpError`.

    A grammar makes its arguments follow the schema: they become fields of the call's item.
    """
    callers = body.items("allowed_callers", 2)
    if callers is not None and _NEUTRAL_CALLERS[0] not in callers:
        raise body.wrong("allowed_callers", "a list with direct")
    environment = body.inner("environment") if kind == SHELL else None
    skills = ""
    if environment is not None:
        if environment.needed_text("type") != "local":
            return None
        skills = _skills(environment)
        environment.refuse_rest()
    body.refuse_rest()
    schema: dict[str, object] = {
        "type": "object",
        "properties": _MEMBERS[kind],
        "required": _REQUIRED[kind],
        "additionalProperties": False,
    }
    function = {"name": kind, "description": _DESCRIPTIONS[kind] + skills, "parameters": schema}
    return Tool(kind, schema, {"type": "function", "function": function}, is_strict=True, kind=kind, given=given)


def _skills(environment: JsonBody) -> str:
    """The skills in the shell's environment, as a part of its description."""
    lines = []
    for index, skill in enumerate(environment.items("skills", MAX_SKILLS) or ()):
        path = f"tools.environment.skills[{index}]"
        if not isinstance(skill, dict):
            raise invalid(path, f"{path} must be an object, not {shown(skill)}")
        body = JsonBody(skill, f"{path}.")
        name, about, place = (body.needed_text(field) for field in ("name", "description", "path"))
        body.refuse_rest()
        lines.append(f"\n- {name} ({place}): {about}")
    return f" Skills, each a folder with instructions in SKILL.md:{''.join(lines)}" if lines else ""


def shell_output(body: JsonBody, path: str, max_outputs: int) -> str:
    """The results of a shell's commands as text for the model. Raises `HttpError`."""
    texts = []
    for index, output in enumerate(body.items("output", max_outputs) or ()):
        place = f"{path}.output[{index}]"
        if not isinstance(output, dict):
            raise invalid(place, f"{place} must be an object, not {shown(output)}")
        texts.append(_one_output(JsonBody(output, f"{place}.")))
    return "\n".join(texts)


def _one_output(body: JsonBody) -> str:
    lines = [body.text("stdout") or ""]
    errors, outcome = body.text("stderr"), body.inner("outcome")
    if errors:
        lines.append(f"stderr: {errors}")
    if outcome is not None:
        code = outcome.whole("exit_code")
        if outcome.needed_text("type") == "timeout":
            lines.append("The time was up.")
        elif code:
            lines.append(f"exit code: {code}")
    return "\n".join(line for line in lines if line)
