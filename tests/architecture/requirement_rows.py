"""Which test shows which row of the requirements, read from docstrings. `requirement_sentences.py` has the rows.

    python -m tests.architecture.requirement_rows > tests/REQUIREMENTS.md

A docstring of a test, or of a whole test module, names rows as "Row A7", "Rows A1, A6" or "Rows D1 to D8".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.requirement_sentences import DEMANDS, WHAT

TESTS = Path(__file__).resolve().parents[1]
ROWS = list(DEMANDS)
_NAMED = re.compile(
    r"\brows?\s+((?:[A-Z]\d+(?:\([a-z]\))?(?:(?:-| to )[A-Z]\d+)?(?:'s)?(?:, (?:and )?| and )?)+)",
    re.IGNORECASE,
)
_NAMES_ONE = re.compile(r"\brows?\s+[A-Z]\d", re.IGNORECASE)
_ID = re.compile(r"([A-E])(\d+)(?:(?:-| to )\1(\d+))?")


def rows_in(text: str) -> set[str]:
    """Return the rows that a docstring names."""
    found: set[str] = set()
    for named in _NAMED.finditer(" ".join(text.split())):
        for letter, first, last in _ID.findall(named.group(1)):
            found.update(f"{letter}{number}" for number in range(int(first), int(last or first) + 1))
    return found & set(ROWS)


def named_tests() -> Iterator[tuple[str, str]]:
    """Yield (row, path::test) of every docstring; a module's own docstring counts for the module."""
    for path in sorted(TESTS.rglob("test_*.py")):
        where = path.relative_to(TESTS.parent).as_posix()
        text = path.read_text()
        if not _NAMES_ONE.search(text):
            continue
        module = ast.parse(text)
        for row in rows_in(ast.get_docstring(module) or ""):
            yield row, where
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for row in rows_in(ast.get_docstring(node) or ""):
                    yield row, f"{where}::{node.name}"


@cache
def by_row() -> dict[str, list[str]]:
    """Return every row with its tests, in order."""
    tests: dict[str, list[str]] = {row: [] for row in ROWS}
    for row, test in named_tests():
        tests[row].append(test)
    return tests


def table() -> str:
    """Return the text of tests/REQUIREMENTS.md."""
    lines = ["# Which test shows which requirement", ""]
    lines += [
        "Made by `python -m tests.architecture.requirement_rows` from the docstrings of the tests. The rows concern "
        "prompt graphs, speculation and images; what they demand is in `tests/architecture/requirement_sentences.py`."
    ]
    tests = by_row()
    for letter in WHAT:
        lines += ["", f"## {letter}: {WHAT[letter]}", "", "| row | demands | tests |", "| --- | --- | --- |"]
        for row in (row for row in ROWS if row[0] == letter):
            lines.append(f"| {row} | {DEMANDS[row]} | {'<br>'.join(f'`{test}`' for test in tests[row])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
