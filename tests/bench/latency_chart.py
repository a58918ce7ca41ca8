"""Draws the chart of the independent measurement: latency of tandem and vLLM at the same loads.

    python -m tests.bench.latency_chart

Reads tests/bench/results/independent-h200.json and writes docs/images/latency.svg and latency-dark.svg. Only drawing
needs matplotlib (`pip install -e '.[bench]'` in the checkout). Each picture contains a digest of the values it shows,
so `tests/architecture/test_chart.py` can detect an outdated picture without matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "tests/bench/results/independent-h200.json"
IMAGES = ROOT / "docs/images"


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of one picture."""

    file: str
    background: str
    ink: str
    faint: str
    tandem: str
    others: tuple[str, str, str]  # vLLM, in the order of its rows


LIGHT = Theme("latency.svg", "#ffffff", "#1f2328", "#57606a", "#0969da", ("#6e7781", "#979fa8", "#bcc3ca"))
DARK = Theme(
    "latency-dark.svg", "#0d1117", "#e6edf3", "#9ea7b3", "#4493f8", ("#9ea7b3", "#768390", "#545d68")
)
THEMES = (LIGHT, DARK)


@dataclass(frozen=True, slots=True)
class Panel:
    """One column of the chart."""

    key: str  # key of a row in the JSON
    title: str
    better: str


PANELS = (
    Panel("ttft_p50", "first token,\nmedian, ms", "less is better"),
    Panel("ttft_p99", "first token,\np99, ms", "less is better"),
    Panel("token_p50", "time per token,\nmedian, ms", "less is better"),
    Panel("gap_p99", "gap between tokens,\np99, ms", "less is better"),
    Panel("goodput", "requests within\nlimits, %", "more is better"),
)


def loads() -> dict[str, list[dict[str, Any]]]:
    """Return the measured rows of each load, tandem first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(MEASURED.read_text())["two_gpus"]["rows"]:
        found.setdefault(row["load"], []).append(row)
    return found


def system(row: dict[str, Any]) -> str:
    """Return the label of a bar's system."""
    return "tandem" if row["system"] == "tandem" else f"vLLM x 2, chunks of {row['chunk']:,}"


def bar(row: dict[str, Any], panel: Panel) -> tuple[float, str]:
    """Return length and label of one bar; a range is drawn at its middle."""
    value = row[panel.key]
    if panel.key != "goodput":
        return value, f"{value:g}"
    low, high = (round(100 * share) for share in value)
    return (low + high) / 2, f"{low}" if low == high else f"{low}-{high}"


def shown() -> list[list[Any]]:
    """Return everything that the pictures show of the measurement: load, system, labels of the bars."""
    rows = [(load, row) for load, rows in loads().items() for row in rows]
    return [[load, system(row), *(bar(row, panel)[1] for panel in PANELS)] for load, row in rows]


def digest_of(values: list[list[Any]]) -> str:
    """Return the digest of everything that a picture shows."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def style(theme: Theme) -> Any:
    """Return matplotlib's settings for pictures with this theme."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "tandem",
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 9,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "xtick.color": theme.faint,
        "ytick.color": theme.ink,
    }


def save(figure: Figure, theme: Theme, title: str, values: list[list[Any]]) -> None:
    """Write a picture with the digest of the values that it shows, and close it."""
    from matplotlib import pyplot

    figure.savefig(
        IMAGES / theme.file,
        facecolor=theme.background,
        metadata={"Date": None, "Title": title, "Description": digest_of(values)},
    )
    pyplot.close(figure)


def only_edge(axes: Axes, theme: Theme, edge: str) -> None:
    """Leave one line of the frame of some axes: "left" or "bottom"."""
    axes.set_facecolor(theme.background)
    for each in ("top", "right", "bottom", "left"):
        axes.spines[each].set_visible(each == edge)
    axes.spines[edge].set_color(theme.faint)


def draw(theme: Theme) -> None:
    """Write one picture."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = loads()
    with matplotlib.rc_context(style(theme)):
        figure, grid = pyplot.subplots(
            len(rows),
            len(PANELS),
            figsize=(10.5, 4.8),
            gridspec_kw={"height_ratios": [len(each) for each in rows.values()]},
            facecolor=theme.background,
        )
        for line, (load, each) in zip(grid, rows.items(), strict=True):
            for axes, panel in zip(line, PANELS, strict=True):
                _bars(axes, each, panel, theme)
            line[0].set_yticks(range(len(each)), [system(row) for row in each])
            line[0].tick_params(left=False)
            line[0].text(-1.14, 1.06, load, transform=line[0].transAxes, fontsize=10, fontweight="bold")
        for axes, panel in zip(grid[0], PANELS, strict=True):
            axes.text(0, 1.16, panel.title, transform=axes.transAxes, fontsize=9.5, fontweight="bold")
        for axes, panel in zip(grid[-1], PANELS, strict=True):
            axes.set_xlabel(panel.better, color=theme.faint, loc="left", fontsize=8.5)
        figure.subplots_adjust(left=0.19, right=0.985, top=0.85, bottom=0.06, wspace=0.12, hspace=0.42)
        save(figure, theme, "Latency of tandem and vLLM", shown())


def _bars(axes: Axes, rows: list[dict[str, Any]], panel: Panel, theme: Theme) -> None:
    """Draw the bars of one load and one column; all loads of a column share one scale."""
    drawn = [bar(row, panel) for row in rows]
    most = max(bar(row, panel)[0] for each in loads().values() for row in each)
    others = iter(theme.others)
    colours = [theme.tandem if row["system"] == "tandem" else next(others) for row in rows]
    axes.barh(range(len(rows)), [value for value, _ in drawn], height=0.72, color=colours)
    for place, (value, label) in enumerate(drawn):
        axes.text(value + most * 0.03, place, label, va="center", fontsize=8.5)
    axes.set_xlim(0, most * 1.25)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xticks([])
    only_edge(axes, theme, "left")


if __name__ == "__main__":
    for each_theme in THEMES:
        draw(each_theme)
        print(f"wrote {(IMAGES / each_theme.file).relative_to(ROOT)}")
