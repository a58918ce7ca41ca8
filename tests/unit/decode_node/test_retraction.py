"""What retraction saves, frees and counts, step by step: pages with the row, or held in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.forward.rotary_places import OneAxis
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NoPrefixCache
from common.messages.generation import SamplingParams
from common.messages.identity import NodeRef
from decode_node.batch_rows import BatchRows
from decode_node.held_pages import HeldPages
from decode_node.host_tier import NoDecodeTier
from decode_node.request import DecodeRequest
from decode_node.retraction import Retraction

PAGE, ROW_BYTES, PAGE_BYTES = 4, 10, 100
PREFILL = NodeRef(name="p", role="prefill", incarnation="7" * 32, peer_address="inproc://nobody")


class HoldingTier(NoDecodeTier):
    """Holds pages of every request for which there is memory."""

    keeps_retracted = True
    can_fetch = True

    def __init__(self) -> None:
        self.held: list[HeldPages] = []
        self.asked: list[int] = []
        self.brought: list[int] = []

    def store_retracted(
        self, request: DecodeRequest, pages: Sequence[int], max_bytes: int
    ) -> HeldPages | None:
        self.asked.append(max_bytes)
        nbytes = len(pages) * PAGE_BYTES
        if nbytes > max_bytes:
            return None
        self.held.append(HeldPages(len(pages), nbytes, None, range(len(pages)), storing=False))
        return self.held[-1]

    def fetch_retracted(self, request: DecodeRequest, held: HeldPages) -> None:
        assert held in self.held
        self.brought.append(request.room)

    def free_retracted(self, held: HeldPages) -> None:
        self.held.remove(held)


class Rig:
    """Two rows and eight pages; backups have a row's bytes and those of pages that no tier holds."""

    def __init__(self, max_bytes: int, tier: NoDecodeTier) -> None:
        self.space, self.rows = PageSpace(PAGE, 9, NoPrefixCache()), BatchRows(2)
        self.retraction = Retraction(
            self.space, self.rows, OneAxis(), max_bytes, lambda pages: ROW_BYTES + PAGE_BYTES * pages, tier
        )

    def running(self, room: int) -> DecodeRequest:
        """A request with 11 tokens, of which ten have KV: in three pages."""
        request = DecodeRequest(
            room=room,
            request_id="r",
            prompt=[3] * 10,
            emitted=0,
            sampling=SamplingParams(max_tokens=9, seed=1),
            prefill=PREFILL,
            received=0.0,
            deadline=9.0,
            output=[5],
            launched=1,
        )
        request.lease = self.space.lease(self.space.keys(request.contents), 3, max_cached_tokens=0)
        self.retraction.occupy(request)
        return request

    def leave(self, request: DecodeRequest, plan: int) -> bool:
        """Save a request; the plan of the copy is executed and read."""
        saved = self.retraction.save(request)
        self.retraction.planned(plan)
        self.retraction.read(plan)
        self.retraction.settle(())
        return saved

    def idle(self) -> bool:
        return (self.retraction.used_bytes, self.space.leased_pages, self.rows.free) == (0, 0, 2)


def test_backups_are_counted_once() -> None:
    rig = Rig(max_bytes=2 * ROW_BYTES + 5 * PAGE_BYTES, tier=NoDecodeTier())
    first, second = rig.running(1), rig.running(2)
    assert rig.leave(first, 1)
    assert rig.retraction.used_bytes == ROW_BYTES + 3 * PAGE_BYTES
    assert not rig.leave(second, 2), "no memory for its pages"
    assert (second.backup, second.lease, second.row) == (None, None, 0)
    rig.rows.take_moves()
    assert rig.retraction.restore(first)
    moves = rig.rows.take_moves()
    ((load,), (join,)) = moves.loads, moves.joins
    assert first.lease is not None
    assert (load.key, load.row, load.first, list(load.pages)) == (1, join.row, 0, first.lease.pages)
    assert moves.forget == (1,)
    rig.retraction.drop(first)
    rig.retraction.release(first)
    assert rig.idle(), "a backup that was loaded is not counted again"
    assert not rig.rows.take_moves().forget


def test_held_pages_count_with_the_row() -> None:
    tier = HoldingTier()
    most = 2 * ROW_BYTES + 5 * PAGE_BYTES
    rig = Rig(most, tier)
    first, second = rig.running(1), rig.running(2)
    assert rig.leave(first, 1)
    assert rig.retraction.used_bytes == ROW_BYTES + 3 * PAGE_BYTES
    assert not rig.leave(second, 2)
    assert tier.asked == [most - ROW_BYTES, most - ROW_BYTES - (ROW_BYTES + 3 * PAGE_BYTES)]
    (save,) = rig.rows.take_moves().saves
    assert save.pages == (), "they are in host memory"
    assert rig.retraction.restore(first)
    assert (tier.brought, tier.held) == ([1], [])
    (load,) = rig.rows.take_moves().loads
    assert load.pages == ()
    rig.retraction.release(first)
    assert rig.idle()


def test_a_request_that_resumes_has_a_page_for_its_next_token() -> None:
    rig = Rig(max_bytes=1000, tier=NoDecodeTier())
    request = rig.running(1)
    # Eleven tokens with KV fit in three pages, and so does the twelfth.
    for tokens, pages in ((11, 3), (12, 4)):
        request.output = [5] * (tokens - 9)
        request.launched = len(request.output)
        assert rig.leave(request, tokens)
        assert rig.retraction.restore(request)
        assert request.lease is not None
        assert (request.seq_len, len(request.lease.pages)) == (tokens, pages)
