"""The chart of loads in the README shows the values of the results that it is drawn from."""

from __future__ import annotations

import re

import pytest

from tests.bench.latency_chart import IMAGES, Theme
from tests.bench.load_chart import LOAD_THEMES, TANDEM, VLLM, load_label, loads_digest, loads_shown

TEXT = re.compile(r"<text[^>]*>([^<]+)</text>")


@pytest.mark.parametrize("theme", LOAD_THEMES, ids=lambda theme: theme.file)
def test_the_picture_is_that_of_the_loads(theme: Theme) -> None:
    picture = (IMAGES / theme.file).read_text()
    assert loads_digest() in picture, "run: python -m tests.bench.load_chart"
    drawn = TEXT.findall(picture)
    assert {*TANDEM, VLLM} <= {*drawn}
    for _, _, _, labels in loads_shown():
        assert set(labels) <= set(drawn)


def test_loads_beyond_the_limits_are_shown() -> None:
    """Each line of tandem goes on to a load at which fewer than 99 % of the requests keep the limits."""
    for line in TANDEM:
        assert min(values[0] for name, _, values, _ in loads_shown() if name == line) < 99


@pytest.mark.parametrize(("share", "label"), [(100.0, "100"), (99.97, "99.9"), (99.46, "99.5"), (86.0, "86")])
def test_a_share_is_never_rounded_up_to_all(share: float, label: str) -> None:
    assert load_label(share, percent=True) == label
