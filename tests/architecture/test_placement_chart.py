"""The chart of placement policies shows the values of the JSON that it is drawn from."""

from __future__ import annotations

import re

import pytest

from tests.bench.latency_chart import IMAGES, Theme
from tests.bench.placement_chart import PLACEMENT_THEMES, POLICIES, placement_digest, placement_shown

TEXT = re.compile(r"<text[^>]*>([^<]+)</text>")


@pytest.mark.parametrize("theme", PLACEMENT_THEMES, ids=lambda theme: theme.file)
def test_the_picture_is_that_of_the_simulation(theme: Theme) -> None:
    picture = (IMAGES / theme.file).read_text()
    assert placement_digest() in picture, "run: python -m tests.bench.placement_chart"
    drawn = TEXT.findall(picture)
    assert {*POLICIES} <= {*drawn}
    for _, _, _, *labels in placement_shown():
        assert set(labels) <= set(drawn)
