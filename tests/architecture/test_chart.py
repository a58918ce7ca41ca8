"""The charts show the values of the results that they are drawn from (only drawing needs matplotlib)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.bench.latency_chart import IMAGES, THEMES, Theme, digest_of, shown
from tests.bench.load_chart import LOAD_THEMES, TANDEM, VLLM, load_label, loads_shown
from tests.bench.placement_chart import PLACEMENT_THEMES, POLICIES, placement_shown

TEXT = re.compile(r"<text[^>]*>([^<]+)</text>")
# Of each chart: its pictures, everything that they show, and the texts in them.
CHARTS: dict[str, tuple[tuple[Theme, ...], Callable[[], list[list[Any]]], Callable[[], set[str]]]] = {
    "latency_chart": (THEMES, shown, lambda: {text for row in shown() for text in row}),
    "load_chart": (
        LOAD_THEMES,
        loads_shown,
        lambda: {*TANDEM, VLLM, *(label for *_, labels in loads_shown() for label in labels)},
    ),
    "placement_chart": (
        PLACEMENT_THEMES,
        placement_shown,
        lambda: {*POLICIES, *(label for _, _, _, *labels in placement_shown() for label in labels)},
    ),
}


@pytest.mark.parametrize(
    ("chart", "theme"),
    [(chart, theme) for chart, (themes, _, _) in CHARTS.items() for theme in themes],
    ids=lambda each: each if isinstance(each, str) else each.file,
)
def test_a_picture_is_that_of_its_results(chart: str, theme: Theme) -> None:
    _, values, texts = CHARTS[chart]
    picture = (IMAGES / theme.file).read_text()
    assert digest_of(values()) in picture, f"run: python -m tests.bench.{chart}"
    assert texts() <= {*TEXT.findall(picture)}


def test_loads_at_which_tandem_is_slower_are_shown() -> None:
    """The JSON has loads at which tandem's bar is the worse one; the chart omits none of its rows."""
    assert len(shown()) == 10
    assert {system.split(" ")[0] for _, system, *_ in shown()} == {"tandem", "vLLM"}


def test_loads_beyond_the_limits_are_shown() -> None:
    """Each line of tandem goes on to a load at which fewer than 99 % of the requests keep the limits."""
    for line in TANDEM:
        assert min(values[0] for name, _, values, _ in loads_shown() if name == line) < 99


@pytest.mark.parametrize(("share", "label"), [(100.0, "100"), (99.97, "99.9"), (99.46, "99.5"), (86.0, "86")])
def test_a_share_is_never_rounded_up_to_all(share: float, label: str) -> None:
    assert load_label(share, percent=True) == label
