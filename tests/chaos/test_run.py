"""Twenty seconds of the chaos harness: every invariant holds on 2p2d over TCP with EAGLE-3 and pictures.

The seed is fixed but the timing is not: a violation is a defect even if it does not recur. `tests/chaos/run --minutes
10 --faults 1000` is the long version.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import namespaces
from tests.chaos.faults import KINDS
from tests.chaos.programs import run_harness

SEED = 11
MINUTES = 0.35
FAULTS = 36
SECONDS = 600.0  # for all of it, beside other tests


@pytest.mark.timeout(900)
def test_no_fault_breaks_an_invariant(tmp_path: Path) -> None:
    arguments = ["--minutes", str(MINUTES), "--faults", str(FAULTS), "--seed", str(SEED), "--clients", "3"]
    # Beside other tests the throughput afterwards says what they leave of the machine: the long runs compare it.
    arguments += ["--no-batches"]
    code, said = run_harness(tmp_path, arguments, SECONDS)
    assert code in (0, 1), said
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["violations"] == {}, said
    assert not result["too_few"], said
    assert result["faults"] == FAULTS
    assert result["complete"] > 30, said
    reason = namespaces.missing()
    if reason is not None:
        pytest.skip(f"clean, but the links between prefill and decode nodes were not disturbed: {reason}")
    assert set(result["faults_by_kind"]) == set(KINDS)
    assert result["with_pictures"] > 5, said
