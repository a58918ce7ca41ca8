"""Layer by layer from several ranks: rank 0 finds the orders at its breaks, and every rank sends its own layers.

The ranks' forwards run one after another here, in either order: a rank whose forward has ended before rank 0 finds its
orders sends the pages afterwards. Pools are empty until a forward stores a layer, so a page that leaves too early is
noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock, patch

import msgspec
import pytest

from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.events import Arrived, Delivered
from kv_transfer.send_order import SendOrder
from prefill_node.page_sending import (
    ByChunk,
    ByLayer,
    GroupPageSending,
    PageSending,
    QueuedByChunk,
    RankPageSending,
    given_to_all,
)
from prefill_node.rank import SendingService
from prefill_node.step_plan import PromptPlan
from tests.fakes.loopback import LoopbackSender
from tests.unit.kv_transfer.group_rig import RECORD, Nodes
from tests.unit.kv_transfer.shares import (
    DST,
    FAMILIES,
    PAIRS,
    SRC,
    TOKENS,
    Pools,
    expect_shares,
    fill_shares,
    whole_planes,
)

SPEC = PoolSpec(TOKENS, FAMILIES["gqa"])
SOURCE = whole_planes(SPEC, True, 1)
ROOM, GENERATION = 1, 5


class StoringAttention:
    """A forward of one rank: it stores layer after layer of the source in the rank's pool."""

    def __init__(self, nodes: Nodes, rank: int) -> None:
        self._endpoint = nodes.prefill.ranks[rank].sender.endpoint
        self._listener: Callable[[int], None] | None = None

    @contextmanager
    def heard_by(self, listener: Callable[[int], None]) -> Iterator[None]:
        self._listener = listener
        yield
        self._listener = None

    def forward(self) -> None:
        layout = self._endpoint.layout
        final = bytearray(layout.total_bytes)
        fill_shares(memoryview(final), layout, SOURCE)
        for layer in range(2):
            for placed in layout.placed:
                if placed.plane.layer == layer:
                    span = slice(placed.offset, placed.offset + placed.nbytes)
                    self._endpoint.kv[span] = final[span]
            assert self._listener is not None
            self._listener(layer)


class RankedPrefill:
    """The page sending of all ranks, as assemble.py and the rank processes compose it."""

    def __init__(self, nodes: Nodes, orders: Callable[[], Sequence[SendOrder]]) -> None:
        self.attentions = [StoringAttention(nodes, rank) for rank in range(len(nodes.prefill.ranks))]
        group, own = nodes.prefill.group, nodes.prefill.ranks[0].sender
        of_running = orders if group is None else partial(given_to_all, group, orders)
        first: PageSending = ByLayer(self.attentions[0], own, of_running, ByChunk(own))  # type: ignore[arg-type]
        self.sending = [first if group is None else GroupPageSending(first, group)]
        pairs = zip(nodes.prefill.services, nodes.prefill.ranks[1:], self.attentions[1:], strict=True)
        for service, rank, attention in pairs:
            by_layer = ByLayer(attention, rank.sender, service.of_running, ByChunk(rank.sender))  # type: ignore[arg-type]
            self.sending.append(RankPageSending(by_layer, service))

    def forward(self, rank: int) -> None:
        with self.sending[rank].during(PromptPlan(generation=GENERATION)):
            self.attentions[rank].forward()


def granted(nodes: Nodes) -> int:
    """Let the decode node grant pages, for which this test gives the orders; return the grant's generation."""
    nodes.prefill.gives_orders = False
    nodes.prefill.expect(ROOM, nodes.decode.leader)
    nodes.decode.open(ROOM, DST, held=0)
    nodes.turns()
    slots = nodes.prefill.node.slots(ROOM)
    assert slots is not None
    return slots.generation


def empty(source: Pools) -> Pools:
    return [plane * 0 for plane in source]


@pytest.mark.parametrize("rank_0_last", [False, True], ids=["rank 0 first", "rank 0 last"])
@pytest.mark.parametrize("sizes", PAIRS, ids=[f"{a}to{b}" for a, b in PAIRS])
def test_every_rank_sends_its_own_layers(sizes: tuple[int, int], rank_0_last: bool) -> None:
    nodes = Nodes(SPEC, sizes, "loopback", empty(SOURCE), before=empty(whole_planes(SPEC, False, 2)))
    generation = granted(nodes)
    waiting = [
        SendOrder(
            room=ROOM,
            generation=generation,
            after=GENERATION,
            complete=len(SRC),
            first=0,
            pages=tuple(SRC),
        )
    ]

    def orders() -> list[SendOrder]:
        found = list(waiting)
        waiting.clear()
        return found

    prefill = RankedPrefill(nodes, orders)
    ranks = list(range(sizes[0]))
    for rank in ranks[::-1] if rank_0_last else ranks:
        prefill.forward(rank)
    nodes.turns(4)
    assert nodes.decode_count(Arrived) == 0
    last = SendOrder(
        room=ROOM,
        generation=generation,
        after=GENERATION,
        complete=len(SRC),
        first=len(SRC),
        pages=(),
        record=RECORD,
    )
    prefill.sending[0].send(last)
    nodes.turns(4)
    for rank, each in enumerate(nodes.prefill.ranks):
        counters = each.sender.counters
        assert counters.pages_by_layer == (0 if rank and rank_0_last else counters.pages_written)
    nodes.prefill.completed = [GENERATION] * sizes[0]
    nodes.turns()
    assert (nodes.decode_count(Arrived), nodes.prefill_count(Delivered)) == (1, 1)
    expect_shares(nodes.decode.pools, SOURCE, empty(whole_planes(SPEC, False, 2)), sent=True)
    assert nodes.holds_nothing()
    nodes.close()


def test_a_rank_carries_out_orders_itself_too() -> None:
    """The worker's `send` of a rank does the same as an order of rank 0 whose plan is complete."""
    nodes = Nodes(SPEC, (2, 2), "loopback", SOURCE)
    generation = granted(nodes)
    sending = RankedPrefill(nodes, list).sending
    for rank in range(2):
        order = SendOrder(room=ROOM, generation=generation, after=0, complete=5, first=0, pages=tuple(SRC))
        if rank == 0:  # gives it to rank 1 as well
            sending[0].send(order)
        nodes.turns(2)
    assert [rank.sender.counters.pages_written for rank in nodes.prefill.ranks] == [len(SRC)] * 2
    sending[1].send(
        SendOrder(room=ROOM, generation=generation, after=0, complete=5, first=5, pages=(), record=RECORD)
    )
    nodes.turns()
    assert nodes.prefill.ranks[1].sender.active == 0
    assert nodes.prefill.ranks[0].sender.active == 1
    nodes.close()


def test_a_rank_queues_pages_of_a_forward_that_runs_already() -> None:
    """The decode node's grant came after the launch: the copies leave with the end of the forward on the device."""
    nodes = Nodes(SPEC, (2, 2), "loopback", SOURCE)
    generation = granted(nodes)
    (transfers,), rank = nodes.prefill.services, nodes.prefill.ranks[1]
    queued = RankPageSending(QueuedByChunk(rank.sender, transfers.of_running), transfers)
    service = SendingService(transfers, queued, Mock(), Mock(), Mock())
    with queued.during(PromptPlan(generation=GENERATION)):
        pass
    given = SendOrder(
        room=ROOM, generation=generation, after=GENERATION, complete=5, first=0, pages=tuple(SRC)
    )
    assert nodes.prefill.group is not None
    with patch.object(LoopbackSender, "waits_for_stream", True):
        service.turn(GENERATION - 1)
        nodes.prefill.group.order(given)
        service.turn(GENERATION - 1)
        assert not transfers.ordered
        nodes.prefill.group.order(msgspec.structs.replace(given, first=5, pages=(), record=RECORD))
        service.turn(GENERATION - 1)
        assert transfers.ordered, "the record follows the forward"
        service.turn(GENERATION)
    nodes.turns(3)
    assert (rank.sender.counters.pages_written, rank.sender.counters.delivered) == (len(SRC), 1)
    nodes.close()
