"""Which bytes a frame may write, without a connection, and how copies are divided into frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.plane import Kept, Plane
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.copy_plan import Copy, single_rows
from kv_transfer.transport.base import Region, Window
from kv_transfer.transport.tcp.frames import Frame, Violation, split
from kv_transfer.transport.tcp.windows import Windows

STATE = Plane("target", 0, "state", Kept.PER_REQUEST, (8,), "float32")
PAGED = Plane("target", 1, "k", Kept.PAGED, (4,), "float32")
LAYOUT = PoolLayout(fingerprint="m", spec=PoolSpec(2, (STATE, PAGED)), num_pages=5, num_slots=4)
STATES, PAGES = LAYOUT.placed
SLOT, PAGE, RECORD = STATES.page_bytes, PAGES.page_bytes, 64
PEER = "0a" * 16


def fence(*windows: Window) -> Windows:
    made = Windows()
    made.use(LAYOUT, RECORD)
    for window in windows:
        made.announce(window)
    return made


def admitted(windows: Windows, offset: int, length: int, region: Region = Region.KV) -> bool:
    try:
        return windows.admits(Frame(region, 1, offset, length), PEER)
    except Violation:
        return False


@pytest.mark.parametrize(
    ("start", "length", "inside"),
    [
        (2 * SLOT, SLOT, True),
        (2 * SLOT, 1, True),
        (3 * SLOT - 1, 1, True),
        (2 * SLOT - 1, 1, False),
        (3 * SLOT - 1, 2, False),
        (SLOT, 2 * SLOT, False),
        (0, SLOT, False),
        (3 * SLOT, SLOT, False),
    ],
)
def test_a_state_is_written_to_its_own_slot_only(start: int, length: int, inside: bool) -> None:
    window = Window(1, PEER, frozenset([0, 1, 2, 3]), 0, state_slot=2)
    assert admitted(fence(window), STATES.offset + start, length) is inside


def test_a_request_without_a_state_writes_none_not_even_to_the_padding_slot() -> None:
    windows = fence(Window(1, PEER, frozenset([0, 1]), 0))
    assert not admitted(windows, STATES.offset, SLOT)
    assert admitted(windows, PAGES.offset, 2 * PAGE)
    assert not admitted(windows, PAGES.offset, 2 * PAGE + 1)


@pytest.mark.parametrize(
    ("start", "length", "inside"),
    [
        (2 * RECORD, RECORD, True),
        (3 * RECORD - 1, 1, True),
        (2 * RECORD - 1, RECORD, False),
        (2 * RECORD, RECORD + 1, False),
    ],
)
def test_a_record_is_written_to_its_own_slot_only(start: int, length: int, inside: bool) -> None:
    windows = fence(Window(1, PEER, frozenset([1]), 2))
    assert admitted(windows, start, length, Region.RECORDS) is inside


def test_only_generations_that_were_announced_may_be_late() -> None:
    windows, late = fence(), Frame(Region.KV, 1, PAGES.offset + PAGE, PAGE)
    with pytest.raises(Violation):
        windows.admits(late, PEER)
    windows.announce(Window(1, PEER, frozenset([1]), 0))
    with pytest.raises(Violation):
        windows.admits(late, "0b" * 16)
    assert windows.admits(late, PEER)
    assert windows.land(1, lambda: 7) == 7
    windows.announce(Window(3, "0b" * 16, frozenset([2]), 1))
    windows.revoke_all_of(PEER)
    assert not windows.admits(late, PEER)
    assert windows.land(1, lambda: 7) is None
    assert windows.land(3, lambda: 7) == 7, "another peer's window stays open"


@given(
    length=st.integers(1, 9),
    rows=st.integers(1, 7),
    apart=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    most=st.integers(1, 20),
)
def test_frames_carry_the_same_rows_in_order(
    length: int, rows: int, apart: tuple[int, int], most: int
) -> None:
    strides = (length + apart[0], length + apart[1]) if rows > 1 else (0, 0)
    copy = Copy(100, 900, length, rows, *strides)
    pieces = list(split([copy], most))
    assert all(0 < piece.length * piece.rows <= most for piece in pieces)
    assert all((piece.rows > 1) or (piece.src_stride, piece.dst_stride) == (0, 0) for piece in pieces)

    def moved(copies: list[Copy]) -> list[tuple[int, int]]:
        return [(row.src + n, row.dst + n) for row in single_rows(copies) for n in range(row.length)]

    assert moved(pieces) == moved([copy])
