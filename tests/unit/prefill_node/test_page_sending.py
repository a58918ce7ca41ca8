"""Pages sent layer by layer between two real nodes: in order, each plane once, the same tokens, no leaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from common.engine.attention.paged import PagedAttention
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from kv_transfer.transport.base import Region
from prefill_node.graphs import prompt_graphs
from tests.fakes.draft_models import eager_drafts, observed
from tests.fakes.loopback import Fault
from tests.fakes.node_cluster import Call, NodeCluster, Shape, Watched
from tests.fakes.scenarios import SAMPLED, expect_reference, lose_decode, prompt_of

SHAPE = Shape(page_size=4, chunk_tokens=64, layers=True, prompt_graphs="none")
TARGET_PLANES = 4  # for two layers


@dataclass
class Diary:
    """Records what happens in a NodeCluster of one prefill node and one decode node, in order."""

    cluster: NodeCluster
    plane_bytes: int = 0  # size of one page in one plane
    lines: list[tuple[str, int]] = field(default_factory=list)  # "attends" layer, "lands" plane, or "record"
    bytes_landed: Counter[tuple[int, int]] = field(default_factory=Counter)  # plane, page -> bytes

    def landed(self, receiver: str, region: Region, start: int, length: int, generation: int) -> None:
        if region is Region.RECORDS:
            self.lines.append(("record", 0))
            return
        layout = self.cluster.fabric.receivers[receiver].layout
        plane = max(n for n, each in enumerate(layout.planes) if each.offset <= start)
        self.lines.append(("lands", plane))
        size = self.plane_bytes = layout.planes[plane].page_bytes
        first = (start - layout.planes[plane].offset) // size
        for page in range(first, first + length // size):
            self.bytes_landed[plane, page] += size

    def attends(self, layer: int) -> None:
        self.lines.append(("attends", layer))


@contextmanager
def watched(shape: Shape) -> Iterator[tuple[NodeCluster, Diary]]:
    """Run a cluster with a diary of the prefill node's target and of what arrives at the decode node."""
    with NodeCluster(shape) as cluster:
        diary = Diary(cluster)
        cluster.fabric.observers.append(diary.landed)
        pool = cluster.prefill.forwards.runner.pool
        forward = PagedAttention.forward

        def spied(self: PagedAttention, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if self.pool is pool:
                diary.attends(layer)
            return forward(self, layer, query, key, value)

        with mock.patch.object(PagedAttention, "forward", spied):
            yield cluster, diary


def submit(cluster: NodeCluster, *prompts: list[int], max_tokens: int = 5, **sampling: Any) -> list[Call]:
    """Submit prompts after the decode node has reserved their pages: destinations are known when forwards begin."""
    calls = [cluster.submit(prompt, max_tokens, legs="d", **sampling) for prompt in prompts]
    cluster.turn(4)
    for call in calls:
        cluster.send_leg(call, "p")
    return calls


@pytest.mark.parametrize("graphs", ["none", "breakable", "piecewise"])
def test_a_layer_leaves_before_the_next_one_attends(graphs: str) -> None:
    """This includes replays with breaks. The record is sent after all layers."""
    with (
        mock.patch.object(prompt_graphs, "UNBROKEN_TOKENS", 4),
        watched(replace(SHAPE, prompt_graphs=graphs)) as (cluster, diary),
    ):
        (call,) = submit(cluster, prompt_of(22))
        cluster.run()
        expect_reference(call)
        if graphs != "none":
            assert cluster.prefill.link.counters.graphs[0].replays == 1
        sent = cluster.prefill.sender.counters
        assert sent.pages_by_layer == sent.pages_written == 6
        assert cluster.prefill.link.counters.layered_pages == 6
        cluster.settle()
    order = list(dict.fromkeys(diary.lines))
    assert order[:6] == [
        *(("lands", 0), ("lands", 1), ("attends", 0)),
        *(("lands", 2), ("lands", 3), ("attends", 1)),
    ]
    assert ("record", 0) in order[6:]


def test_a_graph_without_breaks_sends_by_chunk() -> None:
    with watched(replace(SHAPE, prompt_graphs="breakable")) as (cluster, diary):
        (call,) = submit(cluster, prompt_of(22))
        cluster.run()
        expect_reference(call)
        assert cluster.prefill.link.counters.graphs[0].replays == 1
        sent = cluster.prefill.sender.counters
        assert (sent.pages_by_layer, sent.pages_written) == (0, 6)
        cluster.settle()
    assert set(diary.bytes_landed.values()) == {diary.plane_bytes}


@pytest.mark.parametrize("completion", [Immediate, Watched])
@pytest.mark.parametrize(("chunk", "page_size"), [(7, 4), (64, 1), (16, 16)])
def test_chunks_and_batches_send_each_plane_once(
    chunk: int, page_size: int, completion: type[Completion]
) -> None:
    """A forward has several prompts, prompts are split into chunks, and pages end inside a chunk."""
    shape = replace(SHAPE, chunk_tokens=chunk, page_size=page_size, completion=completion, decode_cache=False)
    with watched(shape) as (cluster, diary):
        calls = submit(cluster, *(prompt_of(n) for n in (1, 15, 16, 17, 40)))
        calls += submit(cluster, prompt_of(3), prompt_of(33), seed=3, **SAMPLED)
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        pages = sum(-(-len(call.prompt) // page_size) for call in calls)
        assert sum(diary.bytes_landed.values()) == pages * TARGET_PLANES * diary.plane_bytes
        sent = cluster.prefill.sender.counters
        assert sent.pages_written == cluster.decode.receiver.counters.pages_received == pages
        assert sent.pages_by_layer == pages
        assert cluster.decode.receiver.counters.gaps == cluster.decode.receiver.counters.duplicates == 0


def test_a_prefix_from_the_cache_leaves_before_the_forward() -> None:
    """Pages that the decode node already holds are not sent at all."""
    for decode_cache in (False, True):
        with watched(replace(SHAPE, decode_cache=decode_cache)) as (cluster, diary):
            (first,) = submit(cluster, prompt_of(22))
            cluster.run()
            sent = cluster.prefill.sender.counters
            before, by_layer = sent.pages_written, sent.pages_by_layer
            diary.lines.clear()
            (second,) = submit(cluster, first.prompt[:20] + prompt_of(9, 5))
            cluster.run()
            expect_reference(first, second)
            assert second.cached_tokens == 20
            assert sent.pages_written - before == (3 if decode_cache else 8)
            assert sent.pages_by_layer - by_layer == 3
            attended = diary.lines.index(("attends", 0))
            assert (("lands", 3) in diary.lines[:attended]) is not decode_cache
            cluster.settle()


def test_a_destination_that_comes_late() -> None:
    """Chunks computed without a destination are sent once it is known, later ones layer by layer."""
    with watched(replace(SHAPE, chunk_tokens=4, completion=Watched)) as (cluster, diary):
        late = cluster.submit(prompt_of(40), legs="p")
        for _ in range(3):
            cluster.turn_one(cluster.prefill)
        assert not diary.bytes_landed
        cluster.send_leg(late, "d")
        cluster.run()
        sent = cluster.prefill.sender.counters
        assert 0 < sent.pages_by_layer < sent.pages_written == 10
        never = cluster.submit(prompt_of(13, 1), legs="p")
        cluster.run(until=lambda: bool(never.output))
        cluster.send_leg(never, "d")
        before = sent.pages_by_layer
        cluster.run()
        assert (sent.pages_by_layer, sent.pages_written) == (before, 14)
        expect_reference(late, never)
        assert set(diary.bytes_landed.values()) == {diary.plane_bytes}
        cluster.settle()


def submit_granted_after_the_first_layer(cluster: NodeCluster, diary: Diary) -> Call:
    """Submit 22 tokens, which are computed at once; the decode node takes its turn during that forward."""
    attends = diary.attends

    def granting(layer: int) -> None:
        attends(layer)
        if layer == 0:
            cluster.turn_one(cluster.decode)

    with mock.patch.object(diary, "attends", granting):
        call = cluster.submit(prompt_of(22))
        cluster.turn_one(cluster.prefill)
    return call


def test_a_destination_that_comes_between_two_layers() -> None:
    """This is the usual case: prompt and reservation are sent together, and the grant takes one more trip."""
    with watched(SHAPE) as (cluster, diary):
        submit(cluster, prompt_of(5))
        cluster.run()
        diary.lines.clear()
        call = submit_granted_after_the_first_layer(cluster, diary)
        assert diary.lines[:6] == [("attends", 0), *(("lands", plane) for plane in range(4)), ("attends", 1)]
        cluster.run()
        expect_reference(call)
        sent = cluster.prefill.sender.counters
        assert sent.pages_by_layer == sent.pages_written == 2 + 6
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_a_destination_that_comes_while_the_last_chunk_is_launched(completion: type[Completion]) -> None:
    """Results may arrive before the node checks its transfers again: the sender must get only one record."""
    with watched(replace(SHAPE, completion=completion)) as (cluster, diary):
        submit(cluster, prompt_of(5))
        cluster.run()
        cluster.fabric.plan = lambda n: Fault(delay=0.002)  # pages are in flight for a turn or two
        call = submit_granted_after_the_first_layer(cluster, diary)
        cluster.run()
        expect_reference(call)
        stages = call.prefill_stages
        assert stages is not None
        assert stages["slots"] <= stages["last_page_sent"]
        cluster.settle()


@pytest.mark.parametrize("graphs", ["none", "breakable"])
def test_a_draft_s_pages_follow(graphs: str) -> None:
    """The target's layers leave during its forward, the draft's planes after its own, the record after both."""
    seen: list[tuple[list[int], list[int]]] = []
    model, step = observed("eagle3", 3, 0.7, seen)
    shape = replace(SHAPE, prompt_graphs=graphs, draft=model, step=step, completion=Watched)
    with (
        mock.patch.object(prompt_graphs, "UNBROKEN_TOKENS", 4),
        watched(shape) as (cluster, diary),
    ):
        calls = submit(cluster, prompt_of(30), prompt_of(9), max_tokens=12)
        cluster.run()
        expect_reference(*calls)
        sent = cluster.prefill.sender.counters
        assert sent.pages_by_layer == sent.pages_written == 8 + 3
        cluster.settle()
    planes = [plane for what, plane in diary.lines if what == "lands"]
    assert set(planes[:8]) == set(range(TARGET_PLANES))
    assert set(diary.bytes_landed.values()) == {diary.plane_bytes}
    assert len(diary.bytes_landed) == (8 + 3) * (TARGET_PLANES + 2)
    assert any(drafts for _, drafts in seen)
    for text, drafts in seen:
        assert drafts == eager_drafts("eagle3", text, len(drafts))


@pytest.mark.parametrize("turns", range(1, 6))
def test_an_abort_in_the_middle(turns: int) -> None:
    """Layers have left and the forward is not read yet: no record follows and nothing leaks."""
    shape = replace(SHAPE, chunk_tokens=8, completion=Watched)
    with NodeCluster(shape) as cluster:
        cluster.fabric.plan = lambda n: Fault(delay=0.002)
        call, other = submit(cluster, prompt_of(40), prompt_of(13))
        cluster.turn(turns)
        cluster.abort(call)
        cluster.run()
        expect_reference(other)
        cluster.settle()


@pytest.mark.parametrize("damage", ["fail", "corrupt", "drop"])
@pytest.mark.parametrize("write", range(4))
def test_a_damaged_layer_fails_only_its_request(write: int, damage: str) -> None:
    """The request is notified once and prefilled again; the forward and its other prompts continue."""
    with NodeCluster(replace(SHAPE, completion=Watched)) as cluster:
        cluster.fabric.plan = lambda n: Fault(damage=damage if n == write else "none")  # type: ignore[arg-type]
        call, other = submit(cluster, prompt_of(30), prompt_of(11))
        cluster.run()
        expect_reference(call, other)
        assert sorted((call.attempts, other.attempts)) == [1, 2]
        cluster.settle()


@pytest.mark.parametrize("turns", [2, 3, 4])
def test_a_decode_node_that_dies_in_the_middle(turns: int) -> None:
    with NodeCluster(replace(SHAPE, chunk_tokens=8, completion=Watched, decodes=2)) as cluster:
        (call,) = submit(cluster, prompt_of(40))
        cluster.turn(turns)
        lose_decode(cluster, call)


def test_a_forward_that_fails_between_two_layers() -> None:
    """Layers that have left stay sent; no record follows, the sender frees the pages, and no listener remains."""
    with watched(SHAPE) as (cluster, diary):
        (call,) = submit(cluster, prompt_of(22))

        def failing(layer: int) -> None:
            if layer == 1:
                raise RuntimeError("CUDA error: out of memory")
            Diary.attends(diary, layer)

        with mock.patch.object(diary, "attends", failing), pytest.raises(RuntimeError, match="out of memory"):
            cluster.run()
        sender = cluster.prefill.sender
        assert {plane for what, plane in diary.lines if what == "lands"} == set(range(4))
        sender.cancel(call.room, "internal_error", "the forward failed")
        sender.poll()
        assert sender.active == 0
        assert ("record", 0) not in diary.lines
        before = len(diary.lines)
        (request,) = cluster.prefill.node.queues
        request.ended = True
        cluster.turn_one(cluster.decode)
        cluster.turn_one(cluster.decode)
        assert cluster.decode.receiver.active == 0
        assert len(diary.lines) == before
