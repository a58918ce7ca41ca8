"""The check of compiled kernels for scalars that one warp replaces before the others have read them."""

from __future__ import annotations

import pytest

from tests.fakes.racing_stores import racing_stores

LOAD = "\tld.global.b32 { %r11 }, [ %rd6 + 0 ];"
STORE = "\t@%p20 st.global.b32 [ %rd6 + 0 ], { %r12 };"
BARRIER = "\tbar.sync \t0;"


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
