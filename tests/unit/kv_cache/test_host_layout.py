"""Host memory is divided into blocks of whole pages and slots, and never exceeds what was given."""

from __future__ import annotations

import pytest

from common.kv_cache.host_cache import pages_of
from common.kv_cache.host_layout import BLOCK_TOKENS, STATE_SHARE, HostLayout, host_layout
from common.kv_cache.plane import Kept, Plane
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from tests.fakes.pools import attention_planes

MIB = 1 << 20
STATE = Plane("target", 3, "state", Kept.PER_REQUEST, (4, 32, 32), "float32")


def device(page_size: int, keeps_state: bool = False) -> PoolLayout:
    planes = attention_planes("target", 3, 2, 16, "bfloat16") + attention_planes("draft", 1, 4, 8, "float32")
    states = (STATE,) if keeps_state else ()
    spec = PoolSpec(page_size, (*planes[:6], *states, *planes[6:]))
    return PoolLayout(fingerprint="f", spec=spec, num_pages=9, num_slots=5 if keeps_state else 0)


def check(layout: HostLayout, given: int, ours: PoolLayout) -> None:
    assert given / 2 < layout.planes.total_bytes <= given
    assert layout.planes.spec == ours.spec
    used = pages_of(range(layout.blocks + 1), layout.block_pages)
    assert used == list(range(layout.planes.num_pages)), "blocks neither overlap nor leave anything out"


@pytest.mark.parametrize(("page_size", "block"), [(1, 256), (16, 256), (48, 288), (512, 512)])
def test_a_block_is_some_whole_pages(page_size: int, block: int) -> None:
    ours = device(page_size)
    layout = host_layout(ours, 8 * MIB, page_size)
    assert layout.block_tokens == block >= BLOCK_TOKENS
    assert layout.block_pages * layout.planes.page_bytes == block * ours.page_bytes // page_size
    assert layout.slots == 0
    check(layout, 8 * MIB, ours)


def test_states_have_a_share_and_blocks_end_where_they_are_saved() -> None:
    ours = device(16, keeps_state=True)
    layout = host_layout(ours, 8 * MIB, 64)
    assert layout.block_tokens == 64
    assert layout.slots + 1 == int(STATE_SHARE * 8 * MIB) // (4 * 32 * 32 * 4) - 1
    check(layout, 8 * MIB, ours)


@pytest.mark.parametrize("keeps_state", [False, True])
def test_too_little_memory_is_refused_with_what_is_needed(keeps_state: bool) -> None:
    ours = device(16, keeps_state)
    with pytest.raises(ValueError, match=r"1000 bytes leave no room .* at least \d+ are needed") as caught:
        host_layout(ours, 1000, 64)
    least = int(str(caught.value).rpartition("at least ")[2].split()[0])
    assert host_layout(ours, least, 64).blocks == 1
    with pytest.raises(ValueError, match=f"at least {least} are needed"):
        host_layout(ours, least - 1, 64)
