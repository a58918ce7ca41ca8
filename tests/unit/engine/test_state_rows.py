"""Rows of a decode batch whose model keeps a state per request, and copies of states in a pool."""

from __future__ import annotations

import pytest
import torch

from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from common.engine.state.state_rows import StateRows, WindowShape
from common.kv_cache.plane import Kept, Plane
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from common.messages.generation import SamplingParams
from tests.fakes.pools import attention_planes

CPU = torch.device("cpu")
SHAPE = WindowShape({1: 3, 4: 2}, 2, torch.float32)
SAMPLING = SamplingParams(max_tokens=1)


def rows() -> StateRows:
    return StateRows.allocate(3, SHAPE, CPU)


def test_windows_have_the_shape_of_each_layer() -> None:
    assert {layer: tuple(window.shape) for layer, window in rows().windows.items()} == {
        1: (4, 2, 3),
        4: (4, 2, 2),
    }
    assert SHAPE.nbytes(3) == sum(window.nbytes for window in rows().windows.values())
    assert WindowShape().nbytes(3) == 0


def test_a_forward_adds_what_was_accepted_since_the_one_before() -> None:
    found = rows()
    found.write_row(2, slot=7, tokens=10)
    batch = torch.tensor([2, 0])
    for seq_len, pending in ((10, 0), (13, 3), (14, 1)):
        state = found.open_window(batch, torch.tensor([seq_len, 0]))
        assert state.slots.tolist() == [7, 0]
        assert state.pending is not None
        assert state.pending.tolist() == [pending, 0]
        assert found.held.tolist() == [0, 0, seq_len, 0]


def test_a_row_moves_with_its_window() -> None:
    found = rows()
    found.write_row(1, slot=2, tokens=5)
    for window in found.windows.values():
        window[1] = torch.randn(window[1].shape)
    before = {layer: window[1].clone() for layer, window in found.windows.items()}
    backup = found.row_copies.copy_out(1)
    found.write_row(1, slot=3, tokens=99)
    for window in found.windows.values():
        window[1] = 0
    found.write_row(3, slot=1, tokens=6)
    found.row_copies.copy_in(3, backup)
    assert (int(found.slots[3]), int(found.held[3])) == (1, 5)
    for layer, window in found.windows.items():
        assert torch.equal(window[3], before[layer])


def test_a_relay_row_gets_the_slot_where_the_model_keeps_state() -> None:
    relay = RelayState.allocate(2, 64, CPU, window=SHAPE)
    relay.write_row(1, [3, 4, 5], 1, SAMPLING, slot=6)
    assert relay.state is not None
    assert (relay.state.slots.tolist(), relay.state.held.tolist()) == ([0, 6, 0], [0, 2, 0])
    with pytest.raises(AssertionError, match="a slot where the model keeps state"):
        relay.write_row(1, [3, 4, 5], 1, SAMPLING)
    with pytest.raises(AssertionError, match="and nowhere else"):
        RelayState.allocate(2, 64, CPU).write_row(1, [3, 4, 5], 1, SAMPLING, slot=6)


def test_a_pool_copies_states_between_slots() -> None:
    state = Plane("target", 1, "state", Kept.PER_REQUEST, (2, 3), "float32")
    spec = PoolSpec(2, (*attention_planes("target", 1, 1, 2, "float32"), state))
    layout = PoolLayout(fingerprint="pool", spec=spec, num_pages=3, num_slots=4)
    storage = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    storage.view(torch.float32).fill_(torch.nan)
    pool = KvPool(layout, "target", storage)
    plane = pool.planes(1)["state"]
    assert tuple(plane.shape) == (4, 2, 3)
    assert not plane[0].any(), "slot 0 is zeroed"
    assert plane[1:].isnan().all(), "other slots are unchanged"
    plane[1:] = torch.arange(18.0).view(3, 2, 3)
    backup = pool.state_copies.copy_out(1)
    plane[1] = 0
    pool.state_copies.copy_in(3, backup)
    assert plane[3].flatten().tolist() == list(range(6))
    assert spec.state_bytes == pool.state_bytes == 24
    assert pool.page_bytes == spec.page_bytes == 2 * 2 * 2 * 4
    assert pool.attention_layer == 0
