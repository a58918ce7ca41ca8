"""Draws the chart of placement policies: cached tokens, first tokens and goodput by policy and number of nodes.

    python -m tests.bench.placement_chart

Reads tests/bench/results/placement-simulation.json and writes docs/images/placement.svg and placement-dark.svg, as
latency_chart.py does; each picture contains a digest of the values it shows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.bench.latency_chart import DARK, IMAGES, LIGHT, ROOT, Theme, only_edge, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIMULATED = ROOT / "tests/bench/results/placement-simulation.json"
PLACEMENT_THEMES = tuple(
    replace(theme, file=theme.file.replace("latency", "placement")) for theme in (LIGHT, DARK)
)
POLICIES = ("cache_aware", "least_loaded", "power_of_two", "round_robin")
# (key of a row, title, factor)
PANELS = (
    ("hit_rate", "prompt tokens cached, %", 100.0),
    ("first_token_p90", "first token, p90, seconds", 0.001),
    ("good_share", "requests within limits, %", 100.0),
)


def rows() -> list[dict[str, Any]]:
    """Return the simulated rows."""
    found: list[dict[str, Any]] = json.loads(SIMULATED.read_text())["rows"]
    return found


def label(value: float) -> str:
    """Return how a bar is labelled."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def placement_shown() -> list[list[Any]]:
    """Return everything that the pictures show: trace, nodes, policy, labels of the bars."""
    return [
        [
            row["trace"],
            row["nodes"],
            row["policy"],
            *(label(row[key] * factor) for key, _, factor in PANELS),
        ]
        for row in rows()
    ]


def draw_placement(theme: Theme) -> None:
    """Write one picture."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(row["trace"] for row in rows()))
    with matplotlib.rc_context(style(theme)):
        figure, grid = pyplot.subplots(
            len(traces), len(PANELS), figsize=(10.5, 5.2), facecolor=theme.background
        )
        for line, trace in zip(grid, traces, strict=True):
            of_trace = [row for row in rows() if row["trace"] == trace]
            for axes, panel in zip(line, PANELS, strict=True):
                _groups(axes, of_trace, panel, theme)
            line[0].set_ylabel(trace, fontsize=10, fontweight="bold")
        for axes, (_, title, _) in zip(grid[0], PANELS, strict=True):
            axes.set_title(title, fontsize=9.5, fontweight="bold", color=theme.ink)
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="lower center", ncols=len(POLICIES), frameon=False, labelcolor=theme.ink
        )
        figure.subplots_adjust(left=0.05, right=0.99, top=0.93, bottom=0.13, wspace=0.08, hspace=0.22)
        save(figure, theme, "Placement policies", placement_shown())


def _groups(axes: Axes, found: list[dict[str, Any]], panel: tuple[str, str, float], theme: Theme) -> None:
    """Draw one group of bars per number of nodes."""
    key, _, factor = panel
    sizes = sorted({row["nodes"] for row in found})
    colours = (theme.tandem, *theme.others)
    values = {(row["nodes"], row["policy"]): row[key] * factor for row in found}
    for number, (policy, colour) in enumerate(zip(POLICIES, colours, strict=True)):
        places = [group + 0.2 * (number - 1.5) for group in range(len(sizes))]
        heights = [values[size, policy] for size in sizes]
        axes.bar(places, heights, width=0.18, color=colour, label=policy)
        for place, height in zip(places, heights, strict=True):
            axes.text(place, height, label(height), ha="center", va="bottom", fontsize=6.5)
    axes.set_ylim(0, 1.12 * max(values.values()))
    axes.set_xticks(range(len(sizes)), [f"{size} nodes" for size in sizes])
    axes.tick_params(bottom=False, left=False, labelleft=False, which="both")
    only_edge(axes, theme, "bottom")


if __name__ == "__main__":
    for each_theme in PLACEMENT_THEMES:
        draw_placement(each_theme)
        print(f"wrote {(IMAGES / each_theme.file).relative_to(ROOT)}")
