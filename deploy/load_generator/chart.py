"""Draws a measurement as SVG: distributions of first tokens and gaps, and goodput. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from deploy.load_generator.goodput_search import GoodputSearch
from deploy.load_generator.measurement import MeasuredLoad
from deploy.load_generator.summary import Limits, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with colour blindness can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", ":", "-.")
MISSING = "needs matplotlib: pip install -e '.[bench]' in the checkout"


def check_matplotlib() -> None:
    """Raise ConfigError if charts cannot be drawn, before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--svg", MISSING) from None


@contextmanager
def _figure(file: Path, title: str, panels: int, size: tuple[float, float]) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure, to be written to the file, and its axes: of each panel if there are several."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "tandem", "font.size": 9}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(1, panels, figsize=size, layout="constrained")
        yield figure, axes
        figure.savefig(file, metadata={"Date": None, "Title": title})
        pyplot.close(figure)


def draw(measured: Sequence[MeasuredLoad], limits: Limits, file: Path) -> None:
    """Write the chart. A line of the distributions is one load on one server: same colour same load."""
    with _figure(file, "Latency under load", 3, (12, 4)) as (figure, panels):
        _distribution(panels[0], "time to first token, ms", limits.first, measured, "ttft_ms")
        _distribution(panels[1], "gap between events, ms", limits.gap, measured, "gap_ms")
        _goodput(panels[2], measured)
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
        )


def draw_search(found: GoodputSearch, file: Path) -> None:
    """Write the chart of a search: the share within both limits by rate, and the rate found for each server.

    A vertical bar reaches from the worst seed of a probe to the best one. An open circle is a probe that ended early.
    """
    with _figure(file, "Highest load within limits", 1, (7, 4.5)) as (figure, axes):
        for result, colour in zip(found.results, COLOURS, strict=False):
            probes = sorted(
                (each for each in found.probes if each.target == result.target), key=lambda each: each.rate
            )
            rates = [each.rate for each in probes]
            axes.plot(rates, [100 * each.share for each in probes], color=colour, linewidth=1)
            for probe in probes:
                shares = [100 * share for share in probe.share_by_seed.values()]
                axes.plot([probe.rate] * 2, [min(shares), max(shares)], color=colour, linewidth=3, alpha=0.3)
                face = "none" if probe.ended_early else colour
                axes.plot([probe.rate], [100 * probe.share], "o", color=colour, markerfacecolor=face)
            label = f"{result.target}: none" if result.rate is None else f"{result.target}: {result.rate:g}/s"
            axes.plot([], [], "o-", color=colour, label=label)
            if result.rate is not None:
                axes.axvline(result.rate, color=colour, linestyle="--", linewidth=0.8)
        axes.axhline(100 * found.bounds.share, color="#888888", linewidth=0.8)
        if probed := [each.rate for each in found.probes]:
            axes.set_xscale("log", base=2)
            kept = {each.rate for each in found.results if each.rate is not None}
            axes.set_xticks(sorted({min(probed), max(probed), *kept}))
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(-2, 102)
        axes.set_xlabel("requests per second")
        axes.set_title(
            f"requests within both limits, % ({100 * found.bounds.share:g} % searched for)", loc="left"
        )
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)


def _colour_and_line(each: MeasuredLoad, measured: Sequence[MeasuredLoad]) -> tuple[str, str]:
    loads = list(dict.fromkeys(other.load for other in measured))
    targets = list(dict.fromkeys(other.target for other in measured))
    return COLOURS[loads.index(each.load) % len(COLOURS)], LINES[targets.index(each.target) % len(LINES)]


def _distribution(
    axes: Axes, title: str, limit: float, measured: Sequence[MeasuredLoad], values: str
) -> None:
    """Draw the share of requests or gaps (upwards) that took at most a time (to the right)."""
    for each in measured:
        quantiles: list[float] = getattr(each, values)
        shares = [index / max(len(quantiles) - 1, 1) for index in range(len(quantiles))]
        colour, line = _colour_and_line(each, measured)
        axes.plot(quantiles, shares, line, color=colour, label=f"{each.target}, {each.load}")
    axes.axvline(1e3 * limit, color="#888888", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_title(title, loc="left")
    axes.set_ylabel("share")
    axes.grid(alpha=0.3)


def _goodput(axes: Axes, measured: Sequence[MeasuredLoad]) -> None:
    shares = [100 * each.summary.goodput for each in measured]
    colours = [_colour_and_line(each, measured)[0] for each in measured]
    places = range(len(measured))
    axes.barh(places, shares, color=colours, height=0.6)
    for place, share in zip(places, shares, strict=True):
        axes.text(share + 1, place, percent(share / 100), va="center")
    axes.set_yticks(places, [f"{each.target}, {each.load}" for each in measured])
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_title("requests within both limits, %", loc="left")
