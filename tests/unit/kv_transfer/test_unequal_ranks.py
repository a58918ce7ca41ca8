"""Transfers between all tensor-parallel sizes, through real senders, receivers and transports, byte for byte.

Each case is one family of planes and one pair of sizes. Every rank has a pool of its own, filled with its share of
pools that no rank holds as a whole; afterwards every decode rank holds exactly its share of what was sent.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from common.kv_cache.pool_spec import PoolSpec
from common.messages.identity import rank_incarnation
from kv_transfer.cuts import sources
from kv_transfer.events import Arrived, Delivered, PagesFree, RoomFailed, SlotsGranted, TransferLost
from tests.fakes import covering
from tests.fakes.loopback import Damage, Fabric, Fault
from tests.fakes.pools import attention_planes
from tests.fakes.waiting import PATIENCE
from tests.unit.kv_transfer.rig import RECORD, Clock, Decode, Prefill
from tests.unit.kv_transfer.shares import (
    DST,
    DST_SLOT,
    FAMILIES,
    PAIRS,
    SRC,
    SRC_SLOT,
    TOKENS,
    Pools,
    expect_shares,
    fill_shares,
    layout,
    receiver_of,
    sender_of,
    whole_planes,
)


@dataclass
class Cluster:
    """All ranks of one prefill node and of one decode node, joined by queues."""

    prefills: list[Prefill]
    decodes: list[Decode]
    fabric: Fabric | None = None
    events: list[object] = field(default_factory=list)

    def peers(self, decode: Decode) -> list[Prefill]:
        mine = decode.layout
        needed = sources(mine.spec, len(self.prefills), mine.tp_rank, mine.tp_size)
        return [self.prefills[rank] for rank in sorted(needed)]

    def fed_by(self, prefill: Prefill) -> tuple[str, ...]:
        return tuple(each.incarnation for each in self.decodes if prefill in self.peers(each))

    def begin(self, room: int, held: int = 1) -> None:
        """Run everything up to the pages: prompts are expected, memory is reserved, pages wait to be sent."""
        for prefill in self.prefills:
            if decodes := self.fed_by(prefill):
                prefill.sender.expect(room, decodes=decodes)
        for decode in self.decodes:
            slot = DST_SLOT if decode.layout.num_slots else 0
            names = [each.incarnation for each in self.peers(decode)]
            decode.receiver.open(room, names, DST, held, state_slot=slot)

    def turn(self) -> None:
        nodes: list[Prefill | Decode] = [*self.prefills, *self.decodes]
        for node in nodes:
            for event in node.poll():
                self.events.append(event)
                if isinstance(event, SlotsGranted) and isinstance(node, Prefill):
                    node.sender.send_pages(event.room, SRC[:2], 1)
                    node.sender.send_pages(event.room, SRC[2:], 3)
                    node.sender.finish(event.room, RECORD, SRC_SLOT if node.layout.num_slots else 0)

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def turn_until(self, kind: type, times: int) -> None:
        until = time.monotonic() + PATIENCE
        while self.count(kind) < times and time.monotonic() < until:
            self.turn()
        assert self.count(kind) == times, self.events

    def close(self) -> None:
        for prefill in self.prefills:
            prefill.sender.close()
        for decode in self.decodes:
            decode.receiver.shutdown()


def make(transport: str, spec: PoolSpec, sizes: tuple[int, int], source: Pools) -> Cluster:
    clock = Clock()
    fabric = Fabric(clock) if transport == "loopback" else None
    prefills, decodes = [], []
    sending_node, taking_node = secrets.token_hex(16), secrets.token_hex(16)
    for rank in range(sizes[0]):
        name, shape = rank_incarnation(sending_node, rank), layout(spec, True, rank, sizes[0])
        memory = memoryview(bytearray(shape.total_bytes))
        fill_shares(memory, shape, source)
        sending = sender_of(transport, fabric, name)
        prefills.append(Prefill(clock, sending, incarnation=sending_node, shape=shape, kv=memory))
    for rank in range(sizes[1]):
        name, shape = rank_incarnation(taking_node, rank), layout(spec, False, rank, sizes[1])
        taking = receiver_of(transport, fabric, name)
        decodes.append(Decode(clock, taking, shape=shape, incarnation=taking_node, record_slots=8))
    cluster = Cluster(prefills, decodes, fabric)
    for decode in decodes:
        for prefill in cluster.peers(decode):
            decode.connect(prefill)
    return cluster


@pytest.fixture(params=["loopback", "shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("transport", "family", "sizes"),
    covering.pairs(("loopback", "shm", "tcp"), tuple(FAMILIES), PAIRS),
    ids=str,
)
def test_every_decode_rank_ends_with_its_share(transport: str, family: str, sizes: tuple[int, int]) -> None:
    spec = PoolSpec(TOKENS, FAMILIES[family])
    source, before = whole_planes(spec, True, 1), whole_planes(spec, False, 2)
    cluster = make(transport, spec, sizes, source)
    try:
        for decode in cluster.decodes:
            fill_shares(decode.kv, decode.layout, before)
        cluster.begin(1)
        cluster.turn_until(Arrived, sizes[1])
        expect_shares([(each.kv, each.layout) for each in cluster.decodes], source, before, sent=True)
        sending = sum(bool(cluster.fed_by(prefill)) for prefill in cluster.prefills)
        cluster.turn_until(Delivered, sending)
        for decode in cluster.decodes:
            decode.receiver.close(1)
            assert decode.receiver.active == 0
        assert cluster.count(RoomFailed) == cluster.count(TransferLost) == 0
    finally:
        cluster.close()


UNEQUAL = [(pair, family) for pair in ((2, 1), (1, 2), (2, 4)) for family in ("gqa", "state")]


@pytest.mark.parametrize(
    ("sizes", "family"), UNEQUAL, ids=[f"{a}to{b} {family}" for (a, b), family in UNEQUAL]
)
@pytest.mark.parametrize("damage", ["corrupt", "drop", "fail"])
def test_one_damaged_part_fails_the_request_on_all_its_ranks(
    damage: Damage, sizes: tuple[int, int], family: str
) -> None:
    """Whichever write is hit, none of the affected ranks reports Arrived, and pages are returned exactly once."""
    spec = PoolSpec(TOKENS, FAMILIES[family])
    for hit in range(3):
        cluster = make("loopback", spec, sizes, whole_planes(spec, True, 1))
        assert cluster.fabric is not None
        cluster.fabric.plan = lambda n, hit=hit: Fault(damage=damage if n == hit else "none")  # type: ignore[misc]
        cluster.begin(1)
        for _ in range(20):
            cluster.turn()
        failed = cluster.count(RoomFailed)
        assert failed >= 1
        assert cluster.count(Arrived) + failed == sizes[1]
        assert cluster.count(PagesFree) == failed
        for decode in cluster.decodes:
            decode.receiver.abort(1, "the test is over")
        for _ in range(20):
            cluster.turn()
        assert cluster.count(PagesFree) == sizes[1]
        assert [each.receiver.active for each in cluster.decodes] == [0] * sizes[1]
        cluster.close()


def test_a_request_that_lacks_a_rank_fails_with_a_sentence() -> None:
    spec = PoolSpec(TOKENS, FAMILIES["gqa"])
    cluster = make("loopback", spec, (2, 1), whole_planes(spec, True, 1))
    (decode,) = cluster.decodes
    decode.pump()
    decode.receiver.open(1, [cluster.prefills[1].incarnation], DST, 1)
    cluster.turn()
    failed = next(event for event in cluster.events if isinstance(event, RoomFailed))
    assert failed.reason == (
        "decode rank 0 of 1 needs pages of prefill ranks 0 of 2, 1 of 2, the request names 1 of 2"
    )
    assert cluster.count(PagesFree) == 1


def test_a_rank_that_has_nothing_to_give_is_refused_with_those_that_do() -> None:
    spec = PoolSpec(TOKENS, attention_planes("target", 1, 2, 4, "float32"))
    cluster = make("loopback", spec, (4, 1), whole_planes(spec, True, 1))
    (decode,) = cluster.decodes
    decode.connect(cluster.prefills[1])
    refused = [str(event) for event in decode.poll()]
    assert len(refused) == 1
    assert "receives nothing from this prefill rank, 1 of 4; connect it to ranks [0, 2]" in refused[0]


@pytest.fixture
def half_done() -> Iterator[Cluster]:
    """Rank 0's part has arrived (two writes of pages, the state, the record); rank 1's writes hang."""
    spec = PoolSpec(TOKENS, FAMILIES["state"])
    cluster = make("loopback", spec, (2, 1), whole_planes(spec, True, 1))
    assert cluster.fabric is not None
    cluster.fabric.plan = lambda n: Fault(damage="stick" if n >= 4 else "none")
    cluster.begin(1)
    for _ in range(4):
        cluster.turn()
    assert cluster.fabric.writes > 4
    assert [each.sender.active for each in cluster.prefills] == [0, 1]
    yield cluster
    cluster.close()


def test_pages_stay_in_quarantine_until_the_last_rank_has_settled(half_done: Cluster) -> None:
    (decode,) = half_done.decodes
    decode.receiver.abort(1, "enough")
    for _ in range(5):
        half_done.turn()
    assert (half_done.count(PagesFree), decode.receiver.quarantined_pages) == (0, len(DST))
    assert half_done.fabric is not None
    half_done.fabric.unstick()
    half_done.turn_until(PagesFree, 1)
    assert (decode.receiver.active, decode.receiver.quarantined_pages) == (0, 0)
    assert half_done.count(Arrived) == 0


def test_the_death_of_one_rank_fails_the_request(half_done: Cluster) -> None:
    (decode,) = half_done.decodes
    assert half_done.fabric is not None
    half_done.fabric.kill(half_done.prefills[1].incarnation)
    for _ in range(5):
        half_done.turn()
    assert half_done.count(RoomFailed) == 1
    half_done.fabric.unstick()
    half_done.turn_until(PagesFree, 1)
    assert decode.receiver.active == 0
