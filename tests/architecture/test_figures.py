"""Figures quoted in the README and docs/performance.md are those of the JSON that names their source."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/bench/results"
PERFORMANCE = (ROOT / "docs/performance.md").read_text()
INDEPENDENT = json.loads((RESULTS / "independent-h200.json").read_text())
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
    assert _table_rows(PERFORMANCE, load) == wanted
    shown = _table_rows((ROOT / "README.md").read_text(), load)
    assert set(shown) <= set(wanted)
    assert shown == [] or {row.split(" | ")[1].split(" ")[0] for row in shown} == {"tandem", "vLLM"}


@pytest.mark.parametrize("kind", ["prompt", "decode_step", "eagle3_round"])
def test_steps_of_one_gpu_are_the_measured_ones(kind: str) -> None:
    found = INDEPENDENT["one_gpu"][kind]
    cells = [_list(*found[system]) for system in ("tandem", "vllm", "floor") if system in found]
    assert f"| {' | '.join(cells)} |" in PERFORMANCE


@pytest.mark.parametrize(
    ("case", "rate", "tree"),
    [
        ("plain", "16/s", "c0763543"),
        ("EAGLE-3", "16/s", "7c8b9c3c"),
        ("plain", "32/s", "8dbc1362"),
        ("EAGLE-3", "32/s", "8dbc1362"),
        ("plain", "32/s, held", "e069ad88"),
        ("EAGLE-3", "32/s, held", "260e324a"),
        ("FP8", "26/s", "fea0492a"),
        ("FP8", "28/s", "fea0492a"),
        ("FP8", "32/s", "7ed48a2f"),
    ],
)
def test_our_own_loads_are_the_measured_ones(case: str, rate: str, tree: str) -> None:
    """The rows of the newest trees that were measured at each load, one per seed where the file has them."""
    rate, *held = rate.split(", ")
    name = "-".join((f"loads-h200-x2-{tree}", case.lower().replace("-", ""), *held))
    loads = [each for each in _result(f"{name}.json")["loads"] if each["load"].startswith(rate)]
    for load in loads:
        found = load["summary"]
        cells = (
            ", ".join((case, load["load"], *held)),
            tree,
            _rounded(found["ttft_ms_p50"], found["ttft_ms_p99"]),
            f"{found['gap_ms_p50']:.1f} / {found['gap_ms_p99']:.1f} / {found['gap_ms_max']:.0f}",
            _rounded(found["second_ms_p50"], found["second_ms_p99"]),
            f"{100 * found['goodput']:.0f} %",
        )
        assert f"| {' | '.join(cells)} |" in PERFORMANCE
    assert loads


@pytest.mark.parametrize(
    ("row", "file", "what", "graphs", "value"),
    [
        ("first token, graphs", "engine-h200.json", "prefill", "breakable", "ms"),
        (
            "graphs off (a slow host; others take 13 ms up to 512 tokens)",
            "engine-h200.json",
            "prefill",
            "none",
            "ms",
        ),
        ("floor: the layers' matrix products, by cuBLAS", "engine-h200.json", "prefill", "none", "floor_ms"),
        ("another H200", "few-rows-engine-after-h200.json", "prefill", "breakable", "ms"),
        ("decode step, one graph", "engine-h200.json", "decode", "full", "ms"),
        ("graphs off", "engine-h200.json", "decode", "none", "ms"),
        ("floor: weights and KV over the copy bandwidth", "engine-h200.json", "decode", "full", "floor_ms"),
        ("another H200", "few-rows-engine-after-h200.json", "decode", "full", "ms"),
    ],
)
def test_prompts_and_steps_are_the_measured_ones(
    row: str, file: str, what: str, graphs: str, value: str
) -> None:
    measured = [each for each in _result(file)["rows"] if each["what"] == what and each["graphs"] == graphs]
    assert f"| {row} | {_digits(each[value] for each in measured)} |" in PERFORMANCE


def test_rounds_are_the_measured_ones() -> None:
    rounds = _result("rounds-h200.json")["rows"]
    row = "EAGLE-3 round: draft + verify + draft-extend"
    assert f"| {row} | {_digits(each['round_ms'] for each in rounds)} |" in PERFORMANCE
    assert f"| floor | {_digits(each['floor_ms'] for each in rounds)} |" in PERFORMANCE
    other = _result("few-rows-rounds-after-h200.json")["rows"]
    assert f"| another H200 | {_digits(each['round_ms'] for each in other)} | - |" in PERFORMANCE


def test_the_cost_of_the_router_is_the_measured_one() -> None:
    rows = _result("router-idle-beside-vllm-router.json")["rows"]
    ours, theirs = ([each for each in rows if each["router"] == name] for name in ("tandem", "vllm-router"))
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        request, token = (mine[key] / other[key] for key in ("request_us", "token_us"))
        cells = (
            f"{mine['streams']:,}",
            f"{mine['request_us']:,.0f} | {other['request_us']:.0f} | {request:.1f}",
            f"{mine['token_us']:.3g} | {other['token_us']:.3g} | {token:.1f}",
        )
        assert f"| {' | '.join(cells)} |" in PERFORMANCE


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def _digits(values: Iterable[float]) -> str:
    """Return cells with three significant digits, closing zeros included."""
    return " | ".join(f"{value:#.3g}".removesuffix(".") for value in values)


def _rounded(*values: float) -> str:
    return " / ".join(f"{value:.0f}" for value in values)
