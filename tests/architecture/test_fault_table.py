"""docs/faults.md names a test for each fault, and every test that it names exists."""

from __future__ import annotations

import re

from tests.architecture.source_tree import ROOT

TABLE = (ROOT / "docs" / "faults.md").read_text()
ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)
TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


def test_every_fault_has_a_row() -> None:
    assert [int(number) for number in ROW.findall(TABLE)] == list(range(1, 37))


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(TABLE)
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert not missing
