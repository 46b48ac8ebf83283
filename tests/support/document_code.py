"""The code in the project's documents: every fenced block, and every block of lines that four spaces indent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("docs", "benchmarks", "examples", "clients", "scripts")
DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.md")))
_FENCE = re.compile(r"^```(\w*)$")


@dataclass(frozen=True)
class Code:
    """`language` is empty for a block of indented lines, and for a fence that names none."""

    document: str
    line: int
    language: str
    text: str

    @property
    def head(self) -> str:
        """Its first line: how a test names it."""
        return self.text.strip().partition("\n")[0].strip()

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


def code_of(path: Path) -> list[Code]:
    found: list[Code] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    document = str(path.relative_to(ROOT))
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        start = number
        if fence is not None:
            number += 1
            while lines[number] != "```":
                number += 1
            found.append(Code(document, start + 1, fence[1], "\n".join(lines[start + 1 : number]) + "\n"))
        elif lines[number].startswith("    ") and (not number or not lines[number - 1].strip()):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            text = "\n".join(line[4:] for line in lines[start:number]).rstrip()
            found.append(Code(document, start + 1, "", text + "\n"))
            number -= 1
        number += 1
    return found


def code_in(document: str, language: str) -> list[Code]:
    """All blocks of `document` in that language."""
    return [code for code in code_of(ROOT / document) if code.language == language]


def all_code() -> list[Code]:
    return [code for path in DOCUMENTS for code in code_of(path)]


def code_about(document: str, about: str) -> Code:
    """The only block of `document` that contains `about`."""
    (found,) = (code for code in code_of(ROOT / document) if about in code.text)
    return found
