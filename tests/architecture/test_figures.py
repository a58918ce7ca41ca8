"""Figures quoted in the README and docs/performance.md are those of the JSON that names their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEPENDENT = json.loads((ROOT / "tests/bench/results/independent-h200.json").read_text())
MEASURED = INDEPENDENT["two_gpus"]["rows"]


def load_row(measured: dict[str, Any]) -> str:
    """Return one row of the tables of loads."""
    system = "tandem" if measured["system"] == "tandem" else f"vLLM x 2, chunks of {measured['chunk']:,}"
    low, high = (round(100 * share) for share in measured["goodput"])
    cells = (
        measured["load"],
        system,
        _list(measured["ttft_p50"], measured["ttft_p99"]),
        _list(measured["gap_p50"], measured["gap_p99"], measured["gap_max"]),
        _list(measured["token_p50"]),
        f"{low} %" if low == high else f"{low}-{high} %",
    )
    return f"| {' | '.join(cells)} |"


def _list(*values: float) -> str:
    return " / ".join(f"{value:g}" for value in values)


def _table_rows(text: str, load: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {load} | ")]


def test_the_source_is_named() -> None:
    assert "someone other than the authors" in INDEPENDENT["source"]


@pytest.mark.parametrize("load", sorted({row["load"] for row in MEASURED}))
def test_tables_of_loads_hold_the_measured_rows(load: str) -> None:
    """docs/performance.md has all rows; the README has a selection that compares vLLM with tandem."""
    wanted = [load_row(row) for row in MEASURED if row["load"] == load]
    assert _table_rows((ROOT / "docs/performance.md").read_text(), load) == wanted
    shown = _table_rows((ROOT / "README.md").read_text(), load)
    assert set(shown) <= set(wanted)
    assert shown == [] or {row.split(" | ")[1].split(" ")[0] for row in shown} == {"tandem", "vLLM"}


@pytest.mark.parametrize("kind", ["prompt", "decode_step", "eagle3_round"])
def test_steps_of_one_gpu_are_the_measured_ones(kind: str) -> None:
    found = INDEPENDENT["one_gpu"][kind]
    cells = [_list(*found[system]) for system in ("tandem", "vllm", "floor") if system in found]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize(
    ("case", "tree"),
    [
        *((case, tree) for case in ("plain", "EAGLE-3", "FP8") for tree in ("8dbc1362", "7ed48a2f")),
        *(("EAGLE-3", tree) for tree in ("1f7f366c", "62e74922")),
        ("plain", "c0763543"),
    ],
)
def test_our_own_loads_are_the_measured_ones(case: str, tree: str) -> None:
    name = f"loads-h200-x2-{tree}-{case.lower().replace('-', '')}.json"
    loads = json.loads((ROOT / "tests/bench/results" / name).read_text())["loads"]
    text = (ROOT / "docs/performance.md").read_text()
    for load in loads:
        found = load["summary"]
        cells = (
            f"{case}, {load['load']}",
            tree,
            _rounded(found["ttft_ms_p50"], found["ttft_ms_p99"]),
            f"{found['gap_ms_p50']:.1f} / {found['gap_ms_p99']:.1f} / {found['gap_ms_max']:.0f}",
            _rounded(found["second_ms_p50"], found["second_ms_p99"]),
            f"{100 * found['goodput']:.0f} %",
        )
        assert f"| {' | '.join(cells)} |" in text
    assert loads


def _rounded(*values: float) -> str:
    return " / ".join(f"{value:.0f}" for value in values)
