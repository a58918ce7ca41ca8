"""Cached prefixes in host memory on a real pair of nodes: texts are those without, and nothing computed is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from common.engine.host_copies import Array, send
from common.errors import InternalError
from common.node.completion import Immediate
from common.node.host_lane import Stage
from common.node.host_store import STORE_SECONDS
from tests.fakes.draft_models import drafting
from tests.fakes.late_host import LateLoads, LateStores, late_lanes
from tests.fakes.node_cluster import ONE_BEHIND, Call, HostShape, MakeCompletion, NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of
from tests.unit.decode_node.test_gated_delta import SERVED, expected

SESSIONS = [prompt_of(120, n) for n in range(4)]
# The pool holds one of the sessions, host memory all of them: blocks of 16 tokens, 7 whole ones per session.
HOST = HostShape(blocks=40, block_pages=2)
SHAPE = Shape(page_size=8, prefill_pool=200, host=HOST, prompt_graphs="none")
WHOLE = 112  # tokens of whole blocks


def serve(cluster: NodeCluster, prompt: list[int], count: int = 4, salt: bytes = b"") -> int | None:
    """Serve one prompt, and return how many of its tokens were not computed."""
    call = cluster.submit(prompt, count, salt=salt)
    finish(cluster)
    expect_reference(call)
    return call.cached_tokens


def finish(cluster: NodeCluster) -> None:
    """Run until nothing is left to do; checksums are computed by threads."""
    until = time.monotonic() + 30
    while not all(call.over for call in cluster.calls) or _busy(cluster):
        cluster.turn()
        time.sleep(0)
        assert time.monotonic() < until, cluster.describe()
    cluster.settle()


def _busy(cluster: NodeCluster) -> bool:
    return any(side.alive and side.host.tier.busy for side in cluster.prefills)


@contextmanager
def served(shape: Shape = SHAPE) -> Iterator[NodeCluster]:
    """Every session was served once, so its pages have left the pool, but for those of the last one."""
    with NodeCluster(shape) as cluster:
        assert [serve(cluster, each) for each in SESSIONS] == [0] * len(SESSIONS)
        yield cluster


@pytest.mark.parametrize("graphs", ["none", "breakable", "piecewise"])
@pytest.mark.parametrize("completion", [Immediate, ONE_BEHIND])
def test_sessions_that_take_turns_are_computed_once(graphs: str, completion: MakeCompletion) -> None:
    with served(replace(SHAPE, prompt_graphs=graphs, completion=completion)) as cluster:
        for _ in range(2):
            assert [serve(cluster, [*each, 1, 2, 3]) for each in SESSIONS] == [WHOLE] * len(SESSIONS)
        said, load = cluster.prefill.link.counters, cluster.prefill.link.load
        assert said.host_hits == 8 * WHOLE
        assert said.host_loads == 8
        assert said.host_queries == said.prompt_tokens - said.cached_tokens
        assert said.host_checksum_failures == 0
        assert said.cached_tokens == 0, "counts what the pool had"
        page = cluster.prefill.forwards.layout.page_bytes
        assert said.host_loaded_bytes == 8 * 14 * page
        assert said.host_stored_bytes == 4 * 14 * page, "what is there is not stored again"
        assert load.host_cached_tokens == 4 * WHOLE
        assert load.host_total_tokens == 40 * 16


def test_without_host_memory_they_are_computed_each_time() -> None:
    with served(replace(SHAPE, host=None)) as cluster:
        assert [serve(cluster, [*each, 1, 2, 3]) for each in SESSIONS] == [0] * len(SESSIONS)


@pytest.mark.parametrize("layers", [False, True])
def test_a_layer_waits_for_its_own_copies(layers: bool) -> None:
    """Copies are made when something follows them: what reads earlier reads the KV of another session."""
    lanes = late_lanes()
    host = replace(HOST, lanes=lambda: lanes)
    with served(replace(SHAPE, host=host, layers=layers)) as cluster:
        stores, loads = lanes
        assert isinstance(loads, LateLoads)
        assert isinstance(stores, LateStores)
        assert [serve(cluster, [*each, 1, 2, 3]) for each in SESSIONS] == [WHOLE] * len(SESSIONS)
        count = cluster.shape.model.num_layers
        assert loads.followed[: count + 1] == list(range(count + 1)), (
            "one after the other, then the checksums"
        )
        assert not loads.pending
        assert stores.copies


def test_inputs_are_sent_before_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU copies from the host in order: inputs that are sent after a prefix would arrive after all of it."""
    lanes, order = late_lanes(), list[str]()
    loads = lanes.back.load

    def record_inputs(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
        order.append("inputs")
        return send(arrays, device)

    def load(copies: Iterable[Callable[[], None]]) -> Sequence[Stage]:
        order.append("load")
        return loads(copies)

    monkeypatch.setattr("prefill_node.step.send", record_inputs)
    monkeypatch.setattr(lanes.back, "load", load)
    with served(replace(SHAPE, host=replace(HOST, lanes=lambda: lanes))) as cluster:
        order.clear()
        assert serve(cluster, [*SESSIONS[0], 1, 2, 3]) == WHOLE
    assert order[:2] == ["inputs", "load"]


def test_a_small_graph_waits_for_all_copies() -> None:
    lanes = late_lanes()
    shape = replace(SHAPE, host=replace(HOST, lanes=lambda: lanes), prompt_graphs="breakable")
    with served(shape) as cluster:
        assert isinstance(lanes.back, LateLoads)
        assert serve(cluster, SESSIONS[0] + [1]) == WHOLE
        count = cluster.shape.model.num_layers
        assert lanes.back.followed == [count - 1, count], "the last copies, then the checksums"


def test_few_tokens_beside_a_long_load_wait_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_node.graphs.prompt_graphs.UNBROKEN_TOKENS", 16)
    monkeypatch.setattr("prefill_node.graphs.prefill_extend.LOADED_PER_TOKEN", WHOLE / 20)
    lanes = late_lanes()
    host = replace(HOST, lanes=lambda: lanes)
    with served(replace(SHAPE, host=host, prompt_graphs="breakable")) as cluster:
        assert isinstance(lanes.back, LateLoads)
        assert serve(cluster, SESSIONS[0] + [1]) == WHOLE
        count = cluster.shape.model.num_layers
        assert lanes.back.followed == list(range(count + 1))


def test_pages_are_free_only_after_their_copy() -> None:
    lanes = late_lanes(asks=1_000_000)
    stores = lanes.out
    assert isinstance(stores, LateStores)
    with NodeCluster(replace(SHAPE, host=replace(HOST, lanes=lambda: lanes))) as cluster:
        first = cluster.submit(SESSIONS[0], 4)
        second = cluster.submit(SESSIONS[1], 4)
        cluster.run(lambda: first.over)
        cluster.turn(50)
        assert not second.output, "the pages of the first one are not free"
        assert len(stores.unfinished) == 1
        stores.asks = 2
        for each in stores.copies:
            each.asks = 0
        finish(cluster)
        expect_reference(first, second)
        assert [serve(cluster, each) for each in SESSIONS[:2]] == [WHOLE] * 2


def test_a_copy_that_does_not_end_is_a_fault_of_the_device() -> None:
    """Otherwise its pages would never be free again."""
    lanes = late_lanes(asks=1_000_000)
    with NodeCluster(replace(SHAPE, host=replace(HOST, lanes=lambda: lanes))) as cluster:
        call = cluster.submit(SESSIONS[0], 4)
        cluster.run(lambda: call.over and bool(lanes.out.unfinished))  # type: ignore[attr-defined]
        cluster.turn(5)
        cluster.clock.now += STORE_SECONDS + 1
        with pytest.raises(InternalError, match="have not been copied to host memory within 60 s"):
            cluster.turn()


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_drafts_after_a_load_are_those_without(name: str) -> None:
    """The draft's KV is in host memory, too: as many drafts are accepted."""
    draft, step = drafting(name, 3)
    totals = []
    for host in (None, replace(HOST, lanes=late_lanes)):
        with NodeCluster(replace(SHAPE, draft=draft, step=step, host=host)) as cluster:
            cached = [serve(cluster, each, 10) for each in (*SESSIONS[:2], *SESSIONS[:2])]
            assert cached == [0, 0, *cached[2:]]
            assert [each == WHOLE for each in cached[2:]] == [host is not None] * 2
            said = cluster.decode.link.counters
            totals.append((said.spec_drafts, said.spec_accepted_tokens))
    assert totals[0] == totals[1]


def test_a_conversation_goes_on_from_both_tiers() -> None:
    """The pool has the beginning, host memory what follows; only the new turn is computed."""
    with served() as cluster:
        text = SESSIONS[0][:40] + prompt_of(30, 9)
        assert serve(cluster, text) == 32
        assert serve(cluster, SESSIONS[0]) == WHOLE
        said = cluster.prefill.link.counters
        assert said.cached_tokens == 40, "the pool's part, in pages of 8"
        assert said.host_hits == 32 + WHOLE - 40


def test_a_salt_finds_only_its_own() -> None:
    with NodeCluster(SHAPE) as cluster:
        found = [serve(cluster, SESSIONS[0], salt=b"a")]
        found += [serve(cluster, each) for each in SESSIONS[1:3]]
        found += [serve(cluster, SESSIONS[0], salt=salt) for salt in (b"b", b"", b"a")]
        assert found == [0, 0, 0, 0, 0, WHOLE]


def test_a_flush_empties_host_memory() -> None:
    with served() as cluster:
        cluster.prefill.node.flush_cache()
        assert cluster.prefill.tier.cache.cached_blocks == 0
        assert [serve(cluster, each) for each in SESSIONS] == [0] * len(SESSIONS)


def test_what_is_stored_during_a_flush_is_not_found() -> None:
    lanes = late_lanes(asks=20)
    with NodeCluster(replace(SHAPE, host=replace(HOST, lanes=lambda: lanes))) as cluster:
        call = cluster.submit(SESSIONS[0], 4)
        cluster.run(lambda: call.over and bool(lanes.out.unfinished))  # type: ignore[attr-defined]
        cluster.prefill.node.flush_cache()
        finish(cluster)
        assert cluster.prefill.tier.cache.cached_blocks == 0
        assert cluster.prefill.tier.cache.writing_blocks == 0


@pytest.mark.parametrize("layers", [False, True])
def test_bytes_that_have_changed_are_computed_again(layers: bool) -> None:
    """The prompt is placed again, and what precedes them is used. Once computed, the same block is written again."""
    with served(replace(SHAPE, layers=layers, completion=ONE_BEHIND)) as cluster:
        store, cache = cluster.prefill.store, cluster.prefill.tier.cache
        prefix = cache.find(cluster.prefill.space.keys(SESSIONS[1]), 120, b"")
        assert prefix is not None
        cache.release(prefix)
        plane = HOST.layout(cluster.prefill.forwards.layout).planes.placed[2]
        at = plane.offset + plane.page_bytes * prefix.blocks[3] * HOST.block_pages
        store.memory[at + 5] += 1
        assert serve(cluster, SESSIONS[1]) == 3 * 16
        assert [failed.code for failed in cluster.failures] == ["cache_damaged"]
        assert cluster.prefill.link.counters.host_checksum_failures == 1
        assert serve(cluster, SESSIONS[0]) == WHOLE
        assert serve(cluster, SESSIONS[1]) == WHOLE
        assert cluster.prefill.link.counters.host_checksum_failures == 1


@pytest.mark.parametrize("turns", range(8))
def test_an_abort_at_any_time(turns: int) -> None:
    """While the prefix is compared, copied, or its prompt computed. Its pages serve others right after."""
    shape = replace(SHAPE, host=replace(HOST, lanes=late_lanes), completion=ONE_BEHIND)
    with served(shape) as cluster:
        aborted = cluster.submit(SESSIONS[0], 4)
        cluster.turn(turns)
        cluster.abort(aborted)
        calls = [cluster.submit(each, 4) for each in SESSIONS]
        finish(cluster)
        expect_reference(*calls)


def test_a_lost_decode_node_during_a_load() -> None:
    shape = replace(SHAPE, host=replace(HOST, lanes=late_lanes), decodes=2, completion=ONE_BEHIND)
    with NodeCluster(shape) as cluster:
        for each in SESSIONS[:3]:
            assert serve(cluster, each) == 0
        call: Call = cluster.submit(SESSIONS[0], 12)
        cluster.run(lambda: cluster.prefill.node.queues.computing != {})
        cluster.kill(call.decode)
        cluster.lose(call.decode)
        finish(cluster)
        expect_reference(call)
        assert call.attempts == 2


def test_a_model_with_a_state_per_request() -> None:
    """The state at the end of the prefix is in host memory, too; without it no prefix is used."""
    texts = [[(11 * i + i * i + 31 * n) % SERVED.vocab_size for i in range(150)] for n in range(3)]
    host = HostShape(blocks=12, slots=3, block_pages=4, lanes=late_lanes)
    shape = Shape(
        model=SERVED,
        prefill_pool=192,
        prefill_snapshots=2,
        prompt_graphs="none",
        completion=ONE_BEHIND,
        host=host,
    )
    with NodeCluster(shape) as cluster:
        for cached in (0, 128, 128):
            for text in texts:
                call = cluster.submit(text, 3)
                finish(cluster)
                assert call.ids == expected(tuple(text), 3)
                assert call.cached_tokens == cached
                assert cluster.prefill.space.cache.snapshots.writing == 0
        store, cache = cluster.prefill.store, cluster.prefill.tier.cache
        plane = host.layout(cluster.prefill.forwards.layout).planes.placed[0]
        prefix = cache.find(cluster.prefill.space.keys(texts[0]), 150, b"")
        assert prefix is not None
        assert prefix.snapshot is not None
        cache.release(prefix)
        store.memory[plane.offset + prefix.snapshot.slot * plane.page_bytes] += 1
        for text, cached in ((texts[0], 0), (texts[1], 128), (texts[2], 128), (texts[0], 128)):
            call = cluster.submit(text, 3)
            finish(cluster)
            assert call.ids == expected(tuple(text), 3)
            assert call.cached_tokens == cached
        assert cluster.prefill.link.counters.host_checksum_failures == 1
