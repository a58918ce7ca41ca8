"""Draws the chart of the README: requests within limits, first tokens and gaps by load, on two H200s.

    python -m tests.bench.load_chart

Reads the results of `tests/gpu/two_gpu_loads.sh` and the independent measurement of vLLM, and writes
docs/images/loads.svg and loads-dark.svg, as latency_chart.py does; each picture contains a digest of what it shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.bench.latency_chart import DARK, IMAGES, LIGHT, MEASURED, ROOT, Theme, only_edge, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = ROOT / "tests/bench/results"
LOAD_THEMES = tuple(replace(theme, file=theme.file.replace("latency", "loads")) for theme in (LIGHT, DARK))
# Of each line: its label, and its files without "loads-h200-x2-" and ".json".
TANDEM = {
    "tandem, FP8": ("993962a5-fp8-held",),
    "tandem, bf16": ("993962a5-plain-held", "e069ad88-plain-held"),
}
VLLM = "vLLM x 2, bf16"
# (key of a summary, title, factor)
LOAD_PANELS = (
    ("goodput", "requests within both limits, %", 100.0),
    ("ttft_ms_p99", "first token, p99, ms", 1.0),
    ("gap_ms_max", "longest gap between tokens, ms", 1.0),
)
LIMITS = (None, 200.0, 15.0)
# Where the label of a point is: offsets in points, and how it is aligned.
SIDES = {
    "above": (0, 6, "center", "bottom"),
    "below": (0, -6, "center", "top"),
    "left": (-4, 3, "right", "bottom"),
    "right": (7, 0, "left", "center"),
}
APART = 4.0  # requests/s between two labels of a line


@dataclass(frozen=True, slots=True)
class Point:
    """One load of one system: the values of the panels."""

    rate: float
    values: tuple[float, ...]


def points() -> dict[str, list[Point]]:
    """Return the points of each line, by load."""
    lines = {}
    for line, files in TANDEM.items():
        found = []
        for file in files:
            for load in json.loads((RESULTS / f"loads-h200-x2-{file}.json").read_text())["loads"]:
                rate = float(load["load"].removesuffix("/s"))
                found.append(Point(rate, tuple(load["summary"][key] * by for key, _, by in LOAD_PANELS)))
        lines[line] = sorted(found, key=lambda point: point.rate)
    return lines | {VLLM: _of_vllm()}


def _of_vllm() -> list[Point]:
    """Return of each load the chunk size with which most requests kept the limits."""
    best: dict[float, Point] = {}
    for row in json.loads(MEASURED.read_text())["two_gpus"]["rows"]:
        rate, _, kind = row["load"].partition("/s ")
        if row["system"] == "tandem" or kind != "plain":
            continue
        values = 100 * max(row["goodput"]), row["ttft_p99"], row["gap_max"]
        at = float(rate)
        if at not in best or best[at].values[0] < values[0]:
            best[at] = Point(at, values)
    return [best[rate] for rate in sorted(best)]


def load_label(value: float, percent: bool) -> str:
    """Return how a point is labelled. A share is never rounded up to all."""
    if not percent:
        return f"{value:.0f}"
    return f"{value:.1f}".removesuffix(".0") if value == 100 or round(value, 1) < 100 else "99.9"


def loads_shown() -> list[list[Any]]:
    """Return everything that the pictures show: line, load, values, labels of the points that have any."""
    shown = []
    for line, found in points().items():
        for point in found:
            labels = [load_label(value, number == 0) for number, value in enumerate(point.values)]
            shown.append([line, point.rate, point.values, labels if point in labelled(found) else []])
    return shown


def labelled(line: Sequence[Point]) -> list[Point]:
    """Return the points of a line that have labels: those that are far enough from the one before."""
    chosen: list[Point] = []
    for point in line:
        if not chosen or point.rate - chosen[-1].rate >= APART:
            chosen.append(point)
    return chosen


def draw_loads(theme: Theme) -> None:
    """Write one picture."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(style(theme)):
        figure, grid = pyplot.subplots(1, len(LOAD_PANELS), figsize=(10.5, 3.3), facecolor=theme.background)
        for number, axes in enumerate(grid):
            _panel(axes, number, theme)
        handles, names = grid[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="lower center", ncols=3, frameon=False, labelcolor=theme.ink)
        figure.subplots_adjust(left=0.035, right=0.985, top=0.9, bottom=0.26, wspace=0.14)
        save(figure, theme, "Loads on two H200s", loads_shown())


def _panel(axes: Axes, number: int, theme: Theme) -> None:
    """Draw one panel: a line per system, and the limit."""
    lines = points()
    most = max(point.values[number] for found in lines.values() for point in found)
    colours = (theme.tandem, theme.ink, theme.others[0])
    # Labels are where no other line is.
    sides = (("above", "above", "right"), ("below", "left", "right"), ("below", "left", "right"))[number]
    for (line, found), colour, mark, side in zip(lines.items(), colours, "osD", sides, strict=True):
        rates = [point.rate for point in found]
        values = [point.values[number] for point in found]
        dashed = "none" if line == VLLM else "-"
        axes.plot(rates, values, color=colour, marker=mark, markersize=4.5, linestyle=dashed, label=line)
        for point in labelled(found):
            axes.annotate(
                load_label(point.values[number], number == 0),
                (point.rate, point.values[number]),
                xytext=SIDES[side][:2],
                textcoords="offset points",
                ha=SIDES[side][2],
                va=SIDES[side][3],
                fontsize=8,
                color=colour,
            )
    limit = LIMITS[number]
    if limit is not None:
        axes.axhline(limit, color=theme.faint, linewidth=0.8, linestyle=":")
        axes.annotate(f"limit {limit:g}", (13.5, limit), va="top", ha="left", fontsize=7.5, color=theme.faint)
    axes.set_title(LOAD_PANELS[number][1], fontsize=9.5, fontweight="bold", color=theme.ink, loc="left")
    axes.set_xlabel("requests/s", color=theme.faint, fontsize=8.5)
    axes.set_xlim(13, 57)
    axes.set_ylim(0, 1.16 * most)
    axes.set_xticks([16, 24, 32, 40, 48, 56])
    axes.tick_params(left=False, labelleft=False)
    only_edge(axes, theme, "bottom")


if __name__ == "__main__":
    for each_theme in LOAD_THEMES:
        draw_loads(each_theme)
        print(f"wrote {(IMAGES / each_theme.file).relative_to(ROOT)}")
