"""The harness finds the two defects that it was built for: without their fixes (R1 and R2), requests hang.

test_run.py shows that none hangs with them: its faults include these kinds. R1: a prefill node is restarted while a
decode node answers one of its requests. R2: frames between nodes are lost. `tests/chaos/undo` removes the fixes from
the processes that the run starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import namespaces
from tests.chaos.cases import UndisturbedHang
from tests.chaos.programs import run_harness

SMALL = ["--prefill", "1", "--decode", "1", "--no-images", "--no-batches", "--until-hang"]
DIRECTED = {
    "R1": ["--kinds", "restart", "--faults", "3", "--minutes", "0.3", "--clients", "1"],
    "R2": ["--kinds", "reset,cut,swallow", "--links", "peer", "--faults", "30", "--minutes", "0.4"],
}
SECONDS = 450.0  # for one run, beside other tests

pytestmark = pytest.mark.timeout(900)


def run(directory: Path, *arguments: str) -> tuple[bool, dict[str, Any], str]:
    """Run the harness; return (whether it complained, result, all printed output)."""
    code, said = run_harness(directory, [*SMALL, *arguments], SECONDS)
    result = json.loads((directory / "result.json").read_text())
    # Connections break without faults, too, when the machine is busy: without a fix the first requests may hang then.
    hung_early = UndisturbedHang.__name__ in result.get("failed", "")
    assert code in (0, 1) or hung_early, said
    return hung_early or code == 1, result, said


def run_without(fix: str, directory: Path) -> tuple[bool, dict[str, Any], str]:
    """Run the harness until it complains, as `run` does, at most three times.

    Whether a fault hits the moment that the fix is for is a matter of chance on a busy machine.
    """
    for seed in ("3", "4", "5"):
        (directory / seed).mkdir()
        ended = run(directory / seed, *DIRECTED[fix], "--undo", fix, "--give-up", "20", "--seed", seed)
        if ended[0]:
            break
    return ended


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[tuple[bool, dict[str, Any], str]]]]:
    """Run the harness without each of the fixes at the same time: a hang is mostly waiting."""
    if (reason := namespaces.missing()) is not None:
        pytest.skip(f"the links between prefill and decode nodes cannot be disturbed: {reason}")
    with ThreadPoolExecutor() as threads:
        yield {fix: threads.submit(run_without, fix, tmp_path_factory.mktemp(fix)) for fix in DIRECTED}


@pytest.mark.parametrize("fix", DIRECTED)
def test_without_a_fix_requests_hang(
    fix: str, runs: dict[str, Future[tuple[bool, dict[str, Any], str]]]
) -> None:
    complained, result, said = runs[fix].result()
    assert complained, said
    # A hang, or an answer that had not ended when its client left: delays of a busy machine are not hangs.
    assert {"I3", "I4"} & set(result["violations"]) or "failed" in result, said
