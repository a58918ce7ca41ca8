"""Pages whose copies are launched before their forward has ended, between two real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from tests.fakes.draft_models import observed
from tests.fakes.loopback import Fault, LoopbackSender
from tests.fakes.node_cluster import NodeCluster, Watched
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of
from tests.unit.prefill_node.test_page_sending import SHAPE, TARGET_PLANES, submit, watched


@contextmanager
def copies_wait_for_forwards() -> Iterator[None]:
    """Let a transport claim that its copies wait for the computing stream: forwards on a CPU are done when launched."""
    with mock.patch.object(LoopbackSender, "waits_for_stream", True):
        yield


QUEUED = replace(SHAPE, layers=False, completion=Watched)


def test_copies_are_queued_after_their_forward() -> None:
    """They do before its results are read, also those of a graph without breaks and of a draft."""
    model, step = observed("eagle3", 3, 0.7, [])
    shape = replace(QUEUED, prompt_graphs="breakable", draft=model, step=step)
    with copies_wait_for_forwards(), watched(shape) as (cluster, diary):
        calls = submit(cluster, prompt_of(22), prompt_of(9), max_tokens=12)
        cluster.turn_one(cluster.prefill)
        landed = dict(diary.bytes_landed)
        assert len(landed) == (6 + 3) * (TARGET_PLANES + 2)
        assert not any(call.output for call in calls)
        cluster.run()
        expect_reference(*calls)
        sent = cluster.prefill.sender.counters
        assert (sent.pages_by_layer, sent.pages_written) == (0, 6 + 3)
        assert diary.bytes_landed == landed
        cluster.settle()


@pytest.mark.parametrize("layers", [False, True])
def test_a_destination_that_comes_while_a_forward_runs(layers: bool) -> None:
    """Its pages leave after that forward, not after its results."""
    with copies_wait_for_forwards(), watched(replace(QUEUED, layers=layers)) as (cluster, diary):
        submit(cluster, prompt_of(5))
        cluster.run()
        diary.bytes_landed.clear()
        call = cluster.submit(prompt_of(22), legs="p")
        cluster.turn_one(cluster.prefill)
        assert not diary.bytes_landed
        cluster.send_leg(call, "d")
        cluster.turn_one(cluster.decode)
        link = cluster.prefill.link
        with mock.patch.object(link, "send", wraps=link.send) as said:
            cluster.fabric.observers.append(
                lambda *_: diary.lines.append(("messages to the router", said.call_count))
            )
            diary.lines.clear()
            cluster.run()
        expect_reference(call)
        order = [what for what, _ in diary.lines if what in ("lands", "record")]
        assert order == ["lands"] * (len(order) - 1) + ["record"]
        said_by = [count for what, count in diary.lines if what == "messages to the router"]
        assert said_by == [0] * (len(order) - 1) + [1], "the first token was read after all pages had left"
        assert set(diary.bytes_landed.values()) == {diary.plane_bytes}
        cluster.settle()


@pytest.mark.parametrize(("chunk", "page_size"), [(7, 4), (64, 1), (16, 16)])
def test_queued_copies_of_chunks_and_batches(chunk: int, page_size: int) -> None:
    shape = replace(QUEUED, chunk_tokens=chunk, page_size=page_size, decode_cache=False)
    with copies_wait_for_forwards(), watched(shape) as (cluster, diary):
        calls = submit(cluster, *(prompt_of(n) for n in (1, 15, 16, 17, 40)))
        calls += submit(cluster, prompt_of(3), prompt_of(33), seed=3, **SAMPLED)
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        pages = sum(-(-len(call.prompt) // page_size) for call in calls)
        assert sum(diary.bytes_landed.values()) == pages * TARGET_PLANES * diary.plane_bytes
        assert cluster.decode.receiver.counters.pages_received == pages
        assert cluster.decode.receiver.counters.gaps == cluster.decode.receiver.counters.duplicates == 0


@pytest.mark.parametrize("damage", ["fail", "corrupt", "drop"])
def test_a_damaged_queued_copy_fails_only_its_request(damage: str) -> None:
    with copies_wait_for_forwards(), NodeCluster(QUEUED) as cluster:
        cluster.fabric.plan = lambda n: Fault(damage=damage if n == 1 else "none")  # type: ignore[arg-type]
        call, other = submit(cluster, prompt_of(30), prompt_of(11))
        cluster.run()
        expect_reference(call, other)
        assert sorted((call.attempts, other.attempts)) == [1, 2]
        cluster.settle()


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("turns", range(1, 6))
def test_an_abort_of_queued_copies(turns: int, layers: bool) -> None:
    shape = replace(QUEUED, chunk_tokens=8, layers=layers)
    with copies_wait_for_forwards(), NodeCluster(shape) as cluster:
        cluster.fabric.plan = lambda n: Fault(delay=0.002)
        call, other = submit(cluster, prompt_of(40), prompt_of(13))
        cluster.turn(turns)
        cluster.abort(call)
        cluster.run()
        expect_reference(other)
        cluster.settle()
