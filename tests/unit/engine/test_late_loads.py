"""The check of compiled kernels for loads after their first barrier."""

from __future__ import annotations

import pytest

from tests.fakes.late_loads import late_loads

SCALAR = "\tld.global.b32 { %r85 }, [ %rd8 + 0 ];"
TENSOR = "\t@%p2 ld.global.v4.b32 { %r22, %r23, %r24, %r25 }, [ %rd6 + 0 ];"
SHARED = "\tld.shared.b32 %r80, [%r81];"
BARRIER = "\tbar.sync \t0;"


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ((SCALAR, TENSOR, BARRIER, SHARED), 0),
        ((TENSOR, BARRIER, SHARED, BARRIER, SCALAR), 1),
        ((BARRIER, SCALAR, TENSOR), 2),
        ((SCALAR, TENSOR), 0),
    ],
)
def test_only_global_loads_after_a_barrier_are_late(lines: tuple[str, ...], count: int) -> None:
    assert len(late_loads("\n".join(lines))) == count
