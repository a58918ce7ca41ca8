"""The table of speculative algorithms, compared with the tables of both nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.named import named
from common.speculation.table import ALGORITHMS, algorithm, algorithms
from decode_node.speculative.drafters.table import DRAFTERS
from prefill_node.draft_table import PREFILL_DRAFTS

ROOT = Path(__file__).parents[3]


def test_every_algorithm_has_what_runs_on_each_node() -> None:
    assert list(PREFILL_DRAFTS) == list(ALGORITHMS)
    assert list(DRAFTERS) == [each.name for each in algorithms() if each.drafts]
    assert [each.name for each in algorithms()] == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_the_rows_name_exists(name: str) -> None:
    directory = algorithm(name).directory
    paths = [PREFILL_DRAFTS[name], *([DRAFTERS[name]] if name in DRAFTERS else [])]
    paths += [] if directory is None else [directory.model]
    assert all(callable(named(path)) for path in paths)


@pytest.mark.parametrize(
    ("name", "slots"),
    [("none", 4), ("ngram", 4), ("standalone", 4), ("eagle", 8), ("eagle3", 8), ("mtp", 6)],
)
def test_slots_of_the_widest_forward(name: str, slots: int) -> None:
    """Three steps: a chain, a tree of 4 branches whose levels take 8, or three modules with rows before the chain."""
    topk = 4 if algorithm(name).trees else 1
    assert algorithm(name).slots(3, topk, 4) == slots


def test_the_records_load_no_torch() -> None:
    code = (
        "import sys; from common.speculation.table import algorithms; algorithms()\n"
        "print([name for name in ('torch', 'safetensors', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
