"""Cached prefixes of a decode node in host memory: pages that were there once are not sent again, texts are equal."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import pytest

from common.errors import InternalError
from common.kv_cache.radix_cache import NO_OBSERVER, CacheObserver
from decode_node.host_fetches import FETCH_SECONDS
from decode_node.host_parts import host_fetches, host_tier
from decode_node.host_tier import DecodePrefixes
from tests.fakes.draft_models import drafting
from tests.fakes.late_host import LateLoads, LateStores, late_lanes
from tests.fakes.node_cluster import ONE_BEHIND, Call, HostShape, NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of

SESSIONS = [prompt_of(120, n) for n in range(4)]
# The pool holds one of the sessions with its answer, host memory all of them: blocks of 16 tokens.
HOST = HostShape(blocks=40, block_pages=2)
SHAPE = Shape(page_size=8, decode_pool=200, decode_host=HOST, prompt_graphs="none", reserved_tokens=4)
PAGES = 15  # of a session
WHOLE = 14  # of them are in whole blocks


def finish(cluster: NodeCluster) -> None:
    """Run until nothing is left to do."""
    until = time.monotonic() + 30
    while not all(call.over for call in cluster.calls) or any(
        side.host_tier.busy for side in cluster.decodes
    ):
        cluster.turn()
        assert time.monotonic() < until, cluster.describe()
    cluster.settle()


def serve(cluster: NodeCluster, prompt: list[int], count: int = 4, salt: bytes = b"") -> int:
    """Serve one prompt, and return how many of its pages were sent."""
    before = cluster.decode.link.counters.transferred_pages if cluster.calls else 0
    call = cluster.submit(prompt, count, salt=salt)
    finish(cluster)
    expect_reference(call)
    return cluster.decode.link.counters.transferred_pages - before


def test_pages_that_left_the_pool_are_not_sent_again() -> None:
    with NodeCluster(SHAPE) as cluster:
        assert [serve(cluster, each) for each in SESSIONS] == [PAGES] * 4
        for _ in range(2):
            assert [serve(cluster, each) for each in SESSIONS] == [PAGES - WHOLE] * 4
        said, load = cluster.decode.link.counters, cluster.decode.link.load
        assert said.host_loads == 8
        assert said.host_hits == 8 * 8 * WHOLE
        assert said.host_queries == said.prompt_tokens - said.cached_tokens
        assert said.host_stored_bytes == 4 * WHOLE * cluster.decode.pool.layout.page_bytes, "each block once"
        assert said.host_checksum_failures == 0
        assert load.host_cached_tokens == 4 * 8 * WHOLE
        assert load.host_total_tokens == 40 * 16


def test_without_host_memory_they_are() -> None:
    with NodeCluster(replace(SHAPE, decode_host=None)) as cluster:
        assert [serve(cluster, each) for each in SESSIONS * 2] == [PAGES] * 8


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    with NodeCluster(SHAPE) as cluster:
        first = cluster.submit(SESSIONS[0], 12)
        finish(cluster)
        for each in SESSIONS[1:]:
            serve(cluster, each)
        # 131 tokens have KV: 8 whole blocks, 16 pages of 8 tokens.
        assert serve(cluster, [*SESSIONS[0], *first.ids, 5, 6, 7]) == 17 - 16


@pytest.mark.parametrize("layers", [False, True])
def test_copies_are_as_late_as_they_may_be(layers: bool) -> None:
    """Pages are reused only after they are stored, and read only after they are there."""
    lanes = late_lanes()
    host = replace(HOST, lanes=lambda: lanes)
    shape = replace(SHAPE, decode_host=host, completion=ONE_BEHIND, layers=layers)
    with NodeCluster(shape) as cluster:
        assert isinstance(lanes.out, LateStores)
        assert isinstance(lanes.back, LateLoads)
        for _ in range(2):
            calls = [cluster.submit(each, 6) for each in SESSIONS]
            finish(cluster)
            expect_reference(*calls)
        assert lanes.out.copies
        assert cluster.decode.link.counters.host_loads > 0
        assert not lanes.back.followed, "a step waited for a copy"


def test_pages_are_not_free_before_they_are_stored() -> None:
    lanes = late_lanes(asks=1_000_000)
    stores = lanes.out
    assert isinstance(stores, LateStores)
    with NodeCluster(replace(SHAPE, decode_host=replace(HOST, lanes=lambda: lanes))) as cluster:
        first, second = (cluster.submit(each, 4) for each in SESSIONS[:2])
        cluster.run(lambda: first.over)
        cluster.turn(40)
        assert len(stores.unfinished) == 1
        assert len(cluster.decode.node.queues.waiting) == 1, "the pages of the first one are not free"
        stores.asks = 2
        for each in stores.copies:
            each.asks = 0
        finish(cluster)
        expect_reference(first, second)


def test_a_fetch_that_does_not_end_is_a_fault_of_the_device() -> None:
    lanes = late_lanes()
    with NodeCluster(replace(SHAPE, decode_host=replace(HOST, lanes=lambda: lanes))) as cluster:
        for each in SESSIONS[:2]:
            serve(cluster, each)
        assert isinstance(lanes.back, LateLoads)
        lanes.back.asks = 1_000_000
        cluster.submit(SESSIONS[0], 4)
        cluster.run(lambda: bool(lanes.back.pending))  # type: ignore[attr-defined]
        cluster.turn(3)
        cluster.clock.now += FETCH_SECONDS + 1
        with pytest.raises(InternalError, match="have not been copied from host memory within 60 s"):
            cluster.turn()


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_drafts_after_a_fetch_are_those_without(name: str) -> None:
    """The draft's KV is in host memory, too: as many drafts are accepted."""
    draft, step = drafting(name, 3)
    totals = []
    for host in (None, replace(HOST, lanes=late_lanes)):
        shape = replace(SHAPE, draft=draft, step=step, decode_host=host)
        with NodeCluster(shape) as cluster:
            for each in (*SESSIONS[:2], *SESSIONS[:2]):
                serve(cluster, each, 10)
            said = cluster.decode.link.counters
            totals.append((said.spec_drafts, said.spec_accepted_tokens))
            assert (said.host_hits > 0) == (host is not None)
    assert totals[0] == totals[1]


def test_bytes_that_have_changed_are_sent_again() -> None:
    """The request is placed again. Once it has ended, the same block is written again."""
    with NodeCluster(SHAPE) as cluster:
        for each in SESSIONS:
            serve(cluster, each)
        cache, host = cluster.decode.tier.cache, cluster.decode.host
        assert host is not None
        prefix = cache.find(cluster.decode.space.keys(SESSIONS[1]), 120, b"")
        assert prefix is not None
        cache.release(prefix)
        plane = host.layout.planes.placed[2]
        host.store.memory[plane.offset + plane.page_bytes * prefix.blocks[3] * HOST.block_pages + 5] += 1
        # The first attempt gets its last page, the second all but what precedes the block, and its first token's.
        assert serve(cluster, SESSIONS[1]) == PAGES - WHOLE + PAGES + 1 - 6
        assert [failed.code for failed in cluster.failures] == ["cache_damaged"]
        assert cluster.decode.link.counters.host_checksum_failures == 1
        serve(cluster, SESSIONS[0])
        assert serve(cluster, SESSIONS[1]) == PAGES - WHOLE
        assert cluster.decode.link.counters.host_checksum_failures == 1


def test_a_salt_finds_only_its_own() -> None:
    with NodeCluster(SHAPE) as cluster:
        serve(cluster, SESSIONS[0], salt=b"a")
        for each in SESSIONS[1:3]:
            serve(cluster, each)
        sent = [serve(cluster, SESSIONS[0], salt=salt) for salt in (b"b", b"", b"a")]
        assert sent == [PAGES, PAGES, PAGES - WHOLE]


def test_a_flush_empties_host_memory() -> None:
    with NodeCluster(SHAPE) as cluster:
        for each in SESSIONS:
            serve(cluster, each)
        cluster.decode.node.flush_cache()
        assert cluster.decode.tier.cache.cached_blocks == 0
        assert serve(cluster, SESSIONS[0]) == PAGES


@pytest.mark.parametrize("turns", range(10))
def test_an_abort_at_any_time(turns: int) -> None:
    """While pages are fetched, sent, or stored. They serve others right after."""
    lanes = late_lanes()
    shape = replace(SHAPE, decode_host=replace(HOST, lanes=lambda: lanes), completion=ONE_BEHIND)
    with NodeCluster(shape) as cluster:
        for each in SESSIONS:
            serve(cluster, each)
        assert isinstance(lanes.back, LateLoads)
        lanes.back.asks = 30
        aborted = cluster.submit(SESSIONS[0], 4)
        cluster.turn(turns)
        cluster.abort(aborted)
        calls = [cluster.submit(prompt_of(120, 10 + n), 4) for n in range(3)]
        finish(cluster)
        expect_reference(*calls)


def test_a_lost_prefill_node_during_a_fetch() -> None:
    lanes = late_lanes(asks=3)
    shape = replace(SHAPE, decode_host=replace(HOST, lanes=lambda: lanes), prefills=2)
    with NodeCluster(shape) as cluster:
        for each in SESSIONS:
            serve(cluster, each)
        assert isinstance(lanes.back, LateLoads)
        call: Call = cluster.submit(SESSIONS[0], 12)
        cluster.run(lambda: bool(lanes.back.pending))  # type: ignore[attr-defined]
        cluster.kill(call.prefill)
        cluster.lose(call.prefill)
        finish(cluster)
        expect_reference(call)
        assert call.attempts == 2


@pytest.mark.parametrize("seed", range(2))
def test_many_turns_of_many_conversations(seed: int) -> None:
    """Both nodes have host memory that is too small for all, requests retract each other, and some are aborted."""
    rng = random.Random(seed)
    host = HostShape(blocks=24, block_pages=2, lanes=late_lanes)
    shape = replace(
        SHAPE,
        prefill_pool=240,
        decode_pool=rng.choice((160, 200, 240)),
        host=host,
        decode_host=replace(host, blocks=rng.choice((20, 28))),
        completion=rng.choice((ONE_BEHIND, SHAPE.completion)),
        backup_bytes=rng.choice((0, 1 << 20)),
        reserved_tokens=0,
    )
    with NodeCluster(shape) as cluster:
        for _ in range(3):
            for _ in range(5):
                text = SESSIONS[rng.randrange(4)][: rng.randrange(60, 120)]
                call = cluster.submit(text, rng.randrange(2, 30))
                cluster.turn(rng.randrange(8))
                if rng.random() < 0.2:
                    cluster.abort(call)
            finish(cluster)
        expect_reference(*(call for call in cluster.calls if not call.aborted))
        assert cluster.decode.link.counters.host_loads > 0


# Four prompts of 20 to 23 tokens and answers of 40, in a pool for two of them.
TIGHT = replace(SHAPE, page_size=4, decode_pool=128, reserved_tokens=0, decode_host=replace(HOST, blocks=60))
PROMPTS = [prompt_of(20 + n, n) for n in range(4)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("draft", ["", "eagle3"])
def test_retracted_requests_are_kept_with_prefixes(late: bool, draft: str) -> None:
    """None is computed again, and their pages take none of the memory that backups have without host memory."""
    shape = replace(TIGHT, completion=ONE_BEHIND) if late else TIGHT
    if late:
        assert shape.decode_host is not None
        shape = replace(shape, decode_host=replace(shape.decode_host, lanes=late_lanes))
    if draft:
        model, step = drafting(draft, 3)
        shape = replace(shape, draft=model, step=step, decode_pool=160)
    with NodeCluster(shape) as cluster:
        calls, most = [cluster.submit(each, 40) for each in PROMPTS], 0
        while not all(call.over for call in calls):
            cluster.turn()
            cluster.decode.tier.cache.check_integrity()
            most = max(most, cluster.decode.tier.cache.held_blocks)
            saved = cluster.decode.backups.nbytes
            assert saved <= 8 * cluster.decode.backups.size_of(0), "no pages"
            assert cluster.turns < 3000, cluster.describe()
        assert most > 0
        assert cluster.decode.link.counters.retractions > 0
        assert not cluster.failures
        finish(cluster)
        expect_reference(*calls)


def test_retracted_requests_replace_prefixes_and_nothing_else() -> None:
    """Host memory is full of prefixes: they make room, and a request for which there is too little is preempted."""
    shape = replace(TIGHT, decode_host=replace(HOST, blocks=6))
    with NodeCluster(shape) as cluster:
        for n in range(6):
            serve(cluster, prompt_of(40, 20 + n))
        assert cluster.decode.tier.cache.cached_blocks == 6
        calls = [cluster.submit(each, 40) for each in PROMPTS]
        finish(cluster)
        expect_reference(*calls)
        said = cluster.decode.link.counters
        assert said.host_evicted_tokens > 0
        assert said.retractions > len(cluster.failures), "some had room"
        assert {failed.code for failed in cluster.failures} == {"preempted"}


def test_backups_are_bounded_beside_prefixes() -> None:
    """`decode.backup_mib` bounds what retracted requests take of host memory."""
    with NodeCluster(replace(TIGHT, backup_bytes=0)) as cluster:
        calls = [cluster.submit(each, 40) for each in PROMPTS]
        finish(cluster)
        expect_reference(*calls)
        assert {failed.code for failed in cluster.failures} == {"preempted"}


def test_a_backup_whose_bytes_have_changed_is_computed_again() -> None:
    with NodeCluster(TIGHT) as cluster:
        calls, damaged = [cluster.submit(each, 40) for each in PROMPTS], False
        while not all(call.over for call in calls):
            cluster.turn()
            held = [each.backup.held for each in cluster.decode.node.queues.retracted if each.backup]
            if held and held[0] and not held[0].storing and not damaged:
                host = cluster.decode.host
                assert host is not None
                plane = host.layout.planes.placed[1]
                host.store.memory[plane.offset + plane.page_bytes * held[0].blocks[0] * HOST.block_pages] += 1
                damaged = True
            assert cluster.turns < 3000, cluster.describe()
        finish(cluster)
        expect_reference(*calls)
        assert damaged
        assert [failed.code for failed in cluster.failures] == ["cache_damaged"]
        assert cluster.decode.link.counters.host_checksum_failures == 1


@pytest.mark.parametrize("turns", range(0, 24, 2 if "TANDEM_EXPLORE" in os.environ else 5))
def test_a_retracted_request_may_leave_at_any_time(turns: int) -> None:
    """While it is stored, held or fetched: what it holds is free once nothing copies it."""
    assert TIGHT.decode_host is not None
    shape = replace(TIGHT, decode_host=replace(TIGHT.decode_host, lanes=late_lanes), completion=ONE_BEHIND)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(each, 40) for each in PROMPTS]
        cluster.run(lambda: len(cluster.decode.node.queues.retracted) > 0)
        room = cluster.decode.node.queues.retracted[0].room
        cluster.turn(turns)
        cluster.abort(cluster.by_room[room])
        finish(cluster)
        expect_reference(*(call for call in calls if not call.aborted))


def test_a_publisher_hears_of_blocks() -> None:
    """KV events name what is in host memory, in blocks of its size."""
    sizes = list[int]()
    with NodeCluster(SHAPE) as cluster:
        host = cluster.decode.host

        def tap(block_tokens: int) -> CacheObserver:
            sizes.append(block_tokens)
            return NO_OBSERVER

        fetches = host_fetches(host, cluster.clock)
        host_tier(host, fetches, cluster.decode.space, cluster.decode.rows, 0, tap)
        assert sizes == [16]


@pytest.mark.parametrize(("backup_blocks", "spare"), [(0, 0), (3, 3), (100, 20)])
def test_prefixes_that_are_being_stored_leave_room_for_retracted_requests(
    backup_blocks: int, spare: int
) -> None:
    """A request is retracted just after others have ended, whose copies to host memory have not."""
    with NodeCluster(SHAPE) as cluster:
        host, space = cluster.decode.host, cluster.decode.space
        assert host is not None
        nbytes = backup_blocks * HOST.block_pages * cluster.decode.pool.layout.page_bytes
        tier = host_tier(host, host_fetches(host, cluster.clock), space, cluster.decode.rows, nbytes)
        assert isinstance(tier, DecodePrefixes)
        cache = tier.cache
        for n in range(5):
            write = cache.reserve(space.keys(prompt_of(16 * 15, n)), b"")
            if n < 2:
                assert write is not None
                cache.commit(write)
        assert cache.available_blocks == spare, "prefixes that nobody uses were replaced, up to there"
        held = cache.hold(spare)
        assert held is not None
        assert len(held) == spare
