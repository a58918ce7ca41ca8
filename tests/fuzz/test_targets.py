"""Every fuzz target with a small, fixed budget: random bytes, and valid inputs with bytes changed, cut and doubled."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import file_targets, http_targets, wire_targets
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {**wire_targets.TARGETS, **file_targets.TARGETS, **http_targets.TARGETS}
PIECES = (
    b"",
    b"\0",
    b"\xff",
    b"[",
    b"{",
    b'"',
    b"-1",
    b"1e999",
    b"9" * 400,
    b"null",
    b"\\u0000",
    b"\n",
    b"[" * 200,
)


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Return a seed with up to eight spans replaced."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 8))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((0, 1, 2, 8, 100))))
        piece = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=4), st.just(data[start:end] * 2)))
        data = data[:start] + piece + data[end:]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_gets_past_the_documented_errors(name: str) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=target.examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.one_of(st.binary(max_size=200), damaged(target.seeds)))
    def run(data: bytes) -> None:
        target.run(data)

    for seed in target.seeds:
        target.run(seed)
    run()
