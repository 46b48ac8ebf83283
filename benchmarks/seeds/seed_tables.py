"""The documents' own figures, from seed_tables.md."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("seed_tables.md")


@dataclass(frozen=True)
class SeedTable:
    """`columns` leaves out the first, which names the rows."""

    corner: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]

    def cell(self, row: str, column: str) -> str:
        return self.rows[row][self.columns.index(column)]


@functools.cache
def seed_tables() -> dict[str, SeedTable]:
    """By name."""
    tables: dict[str, SeedTable] = {}
    for section in _FILE.read_text().split("\n## ")[1:]:
        name, _, text = section.partition("\n")
        head, _, *body = ([cell.strip() for cell in line[1:-1].split("|")] for line in _table_lines(text))
        if name.startswith("s4") and name != "s4-dfs":  # one row, without a name
            tables[name] = SeedTable("", tuple(head), {"": tuple(body[0])})
        else:
            tables[name] = SeedTable(head[0], tuple(head[1:]), {cells[0]: tuple(cells[1:]) for cells in body})
    return tables


def _table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]
