"""The check of the code's shape finds what it is for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.house import (
    MAX_ATTRIBUTES,
    MAX_LINES,
    MAX_METHODS,
    circles,
    code_lines,
    imports_of,
    large_classes,
    long_modules,
    modules_of,
    possessive_groups,
)

_SCRIPT = Path(__file__).parents[3] / "scripts" / "house.py"


def _write(folder: Path, **texts: str) -> dict[str, Path]:
    (folder / "house").mkdir()
    for name, text in texts.items():
        (folder / "house" / f"{name}.py").write_text(text)
    return modules_of(folder)


def test_modules_that_import_each_other_are_found_also_for_type_checkers_and_within_functions(tmp_path: Path) -> None:
    modules = _write(
        tmp_path,
        first="from house.second import two\n",
        second="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import third\n",
        third="def late() -> None:\n    import house.first\n",
        other="import house.first\n",
    )
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}

    assert circles(graph) == [["house.first", "house.second", "house.third"]]


def test_a_class_with_too_many_methods_or_attributes_is_named_unless_it_says_why(tmp_path: Path) -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(MAX_METHODS + 1))
    attributes = "".join(f"        self.a{number} = {number}\n" for number in range(MAX_ATTRIBUTES + 1))
    path = tmp_path / "large.py"
    path.write_text(
        f"class Busy:\n{methods}\n\nclass Rich:\n    def __init__(self):\n{attributes}\n\n"
        f"class Excused:\n    def __init__(self):\n        # As large as it is, since it must.\n{attributes}\n\n"
        "class Small:\n    def __init__(self):\n        self.a = 1\n"
    )

    assert [sentence.split("class ")[1].split()[0] for sentence in large_classes(path)] == ["Busy", "Rich"]


def test_a_module_of_too_many_lines_is_named_unless_it_says_why(tmp_path: Path) -> None:
    modules = _write(
        tmp_path,
        full="a = 1\n" * MAX_LINES,
        long="a = 1\n" * (MAX_LINES + 1),
        excused="# As long as it is, since it must.\n" + "a = 1\n" * MAX_LINES,
    )

    assert list(long_modules(modules)) == [f"{modules['house.long']}: {MAX_LINES + 1} lines; at most {MAX_LINES}"]


def test_a_possessive_group_in_a_pattern_is_named(tmp_path: Path) -> None:
    path = tmp_path / "patterns.py"
    path.write_text(
        "import re\nre.compile(r'(a|b++)++')\nre.compile(r'a++(b)+')\nre.compile(rf'{1}(?:a)?+')\nx = '()*+'\n"
    )

    assert [sentence.removeprefix(str(path)).split(":")[1] for sentence in possessive_groups(path)] == ["2", "4"]


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    assert code_lines('"""What it is.\n\nMore.\n"""\n\n# why\nx = (\n    1\n)\n"""Of x."""\n') == 3


def test_the_command_fails_for_a_circle_and_counts(tmp_path: Path) -> None:
    _write(tmp_path, first="import house.second\n", second="import house.first\n")
    command = [sys.executable, str(_SCRIPT), "--source", str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    counted = subprocess.run([*command, "--count"], capture_output=True, text=True, check=True)

    assert failed.returncode == 1
    assert "house.first, house.second" in failed.stdout
    assert counted.stdout.strip() == "2"
