"""The chart of the independent measurement shows the values of its JSON (only drawing needs matplotlib)."""

from __future__ import annotations

import re

import pytest

from tests.bench.latency_chart import IMAGES, THEMES, Theme, digest, shown

TEXT = re.compile(r"<text[^>]*>([^<]+)</text>")


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.file)
def test_the_picture_is_that_of_the_measurement(theme: Theme) -> None:
    picture = (IMAGES / theme.file).read_text()
    assert digest() in picture, "run: python -m tests.bench.latency_chart"
    drawn = TEXT.findall(picture)
    for load, system, *labels in shown():
        assert load in drawn
        assert system in drawn
        assert set(labels) <= set(drawn)


def test_loads_at_which_tandem_is_slower_are_shown() -> None:
    """The JSON has loads at which tandem's bar is the worse one; the chart omits none of its rows."""
    assert len(shown()) == 10
    assert {system.split(" ")[0] for _, system, *_ in shown()} == {"tandem", "vLLM"}
