"""Check the code: no import cycles, no class or module that is too large, no pattern that older Pythons read wrongly.

python scripts/house.py             check `src`, as `make check` does
python scripts/house.py --count     lines of code in `src`, without blanks, comments and docstrings
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MAX_METHODS = 30
MAX_ATTRIBUTES = 15
LIMITED = ("engine", "transfer", "client", "cacheserver")
"""Packages whose classes are checked. A larger class needs an `EXCUSE`, a comment in its body."""
EXCUSE = "# As large as it is, since"
MAX_LINES = 600
"""Of any module. A longer one needs a `LENGTH_EXCUSE`, a comment on a line of its own; better, it is two nouns."""
LENGTH_EXCUSE = "# As long as it is, since"
_POSSESSIVE_GROUP = re.compile(r"(?<!\\)\)(?:[*+?]|\{[0-9,]{1,9}\})\+")


def modules_of(source: Path) -> dict[str, Path]:
    """By dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that `name` imports, wherever in it: for type checkers, and within functions, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return {one for one in found if one in modules and one != name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in graph:
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(group) > 1:
                        found.append(sorted(group))
    return found


def large_classes(path: Path) -> Iterator[str]:
    """A sentence for each class over a limit without an excuse."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        attributes = _attributes_of(node)
        if len(methods) <= MAX_METHODS and len(attributes) <= MAX_ATTRIBUTES:
            continue
        if not any(EXCUSE in line for line in lines[node.lineno - 1 : node.end_lineno]):
            yield (
                f"{path}:{node.lineno}: class {node.name} has {len(methods)} methods and {len(attributes)} attributes; "
                f"at most {MAX_METHODS} and {MAX_ATTRIBUTES}"
            )


def long_modules(modules: dict[str, Path]) -> Iterator[str]:
    """A sentence for each module over the limit without an excuse."""
    for path in modules.values():
        lines = path.read_text().splitlines()
        if len(lines) > MAX_LINES and not any(line.startswith(LENGTH_EXCUSE) for line in lines):
            yield f"{path}: {len(lines)} lines; at most {MAX_LINES}"


def possessive_groups(path: Path) -> Iterator[str]:
    """A sentence for each possessive group in a pattern: before Python 3.11.5, it takes what it must give back."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")):
            continue
        texts = [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
        if any(isinstance(text, str) and _POSSESSIVE_GROUP.search(text) for text in texts):
            yield f"{path}:{node.lineno}: a possessive group, such as (...)++, is wrong before Python 3.11.5"


def _attributes_of(node: ast.ClassDef) -> set[str]:
    """Attributes that its methods assign. Fields of values are not counted: a message has as many as it needs."""
    found: set[str] = set()
    for inner in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(inner, ast.Assign):
            targets = [leaf for target in inner.targets for leaf in ast.walk(target) if isinstance(leaf, ast.expr)]
        elif isinstance(inner, (ast.AnnAssign, ast.AugAssign)):
            targets = [inner.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
    return found


def code_lines(text: str) -> int:
    """Lines with code: no blanks, no comments, no docstrings and no other strings that stand alone."""
    tree = ast.parse(text)
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            prose.update(range(node.lineno, node.end_lineno + 1))
    counted: set[int] = set()
    passed = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in passed:
            counted.update(range(token.start[0], token.end[0] + 1))
    return len(counted - prose)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--count", action="store_true", help="count lines of code instead")
    arguments = parser.parse_args()
    modules = modules_of(arguments.source)
    if arguments.count:
        print(sum(code_lines(path.read_text()) for path in modules.values()))
        return 0
    graph = {name: imports_of(name, path, modules) for name, path in modules.items()}
    problems = [f"these import each other: {', '.join(group)}" for group in circles(graph)]
    problems += long_modules(modules)
    for name, path in modules.items():
        problems += possessive_groups(path)
        if name.split(".")[1:2] and name.split(".")[1] in LIMITED:
            problems += large_classes(path)
    for problem in problems:
        print(problem)
    print(f"house: {len(modules)} modules, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
