"""The checks of compiled kernels for barriers between what all threads do and what one thread does."""

from __future__ import annotations

import pytest

from tests.fakes.racing_stores import early_counts, racing_stores

LOAD = "\tld.global.b32 { %r11 }, [ %rd6 + 0 ];"
STORE = "\t@%p20 st.global.b32 [ %rd6 + 0 ], { %r12 };"
BARRIER = "\tbar.sync \t0;"
RESULT = "\t@%p65 st.global.v4.b32 [ %rd214 + 0 ], { %r953, %r954, %r955, %r956 };"
COUNT = "\t@%p67 atom.global.gpu.acq_rel.add.u32 %r969, [ %rd230 + 0 ], %r970;"


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ((LOAD, STORE), 1),
        ((LOAD, BARRIER, STORE), 0),
        ((BARRIER, LOAD, STORE, STORE), 2),
        ((STORE, LOAD), 0),
        ((LOAD, STORE.replace("%rd6", "%rd7")), 0),
        ((LOAD.replace("ld", "@%p20 ld"), STORE), 0),  # of a tensor: every thread stores what it has loaded
    ],
)
def test_a_barrier_separates_the_load_of_all_from_the_store_of_one(
    lines: tuple[str, ...], count: int
) -> None:
    assert racing_stores("\n".join(lines)) == [STORE.strip()] * count


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ((RESULT, COUNT), True),
        ((RESULT, BARRIER, COUNT, RESULT), False),
        ((RESULT, BARRIER, RESULT, COUNT), True),
        ((BARRIER, RESULT, "$L__BB0_14:", COUNT), True),
    ],
)
def test_a_barrier_separates_the_stores_of_all_from_the_count_of_one(
    lines: tuple[str, ...], early: bool
) -> None:
    assert early_counts("\n".join(lines)) == [COUNT.strip()] * early
