"""Transfers between all tensor-parallel sizes, through real senders, receivers and transports, byte for byte.

Each case is one family of planes and one pair of sizes. Every rank has a pool of its own, filled with its share of
pools that no rank holds as a whole; afterwards every decode rank holds exactly its share of what was sent.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from common.checkpoint.gated_delta_config import GatedDeltaConfig
from common.config.transports import transport_kind
from common.kv_cache.gated_delta import GATED_DELTA
from common.kv_cache.plane import HeadGroup, Kept, Plane
from common.kv_cache.pool_layout import PlacedPlane, PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.cuts import sources
from kv_transfer.events import Arrived, Delivered, PagesFree, RoomFailed, SlotsGranted, TransferLost
from kv_transfer.transport.base import ReceiverEndpoint, ReceiverSetup, SenderEndpoint, SenderSetup
from kv_transfer.transport.loopback.endpoints import Damage, Fabric, Fault
from kv_transfer.transport.registry import make_receiver, make_sender
from tests.fakes.pools import attention_planes
from tests.fakes.tiny_model import CONFIG
from tests.fakes.waiting import PATIENCE
from tests.unit.kv_transfer.rig import LIMITS, RECORD, Clock, Decode, Prefill

SIZES = (1, 2, 4)
PAIRS = [(a, b) for a, b in itertools.product(SIZES, SIZES)]
HYBRID = replace(CONFIG, gated_delta=GatedDeltaConfig(2, 12, 4, 2, grouped_rows=False))
CONVOLUTION = (HeadGroup(4, 2), HeadGroup(4, 2), HeadGroup(8, 2))
FAMILIES = {
    "gqa": attention_planes("target", 2, 8, 4, "bfloat16"),
    "replicated": attention_planes("target", 2, 2, 4, "float32"),
    "latent": (Plane("target", 0, "latent", Kept.PAGED, (18,), "bfloat16"),),
    "state": (
        Plane("target", 0, "conv", Kept.PER_REQUEST, (32, 3), "bfloat16", 0, CONVOLUTION),
        Plane("target", 0, "recurrent", Kept.PER_REQUEST, (8, 4, 2), "float32", 0, (HeadGroup(8, 1),)),
        *attention_planes("target", 1, 4, 4, "bfloat16"),
    ),
    # Twelve value heads of two key heads: with four ranks each key head is on two of them.
    "gated delta": (
        *GATED_DELTA.planes("target", HYBRID, 1, "bfloat16"),
        *attention_planes("target", 1, 4, 4, "bfloat16"),
    ),
    "draft": (
        *attention_planes("target", 2, 4, 4, "bfloat16"),
        *attention_planes("draft", 1, 1, 6, "float32"),
    ),
    "inner axis": (Plane("target", 0, "k", Kept.PAGED, (3, 8), "float32", 1, (HeadGroup(8, 1),)),),
}
TOKENS, SRC_PAGES, DST_PAGES, SRC_SLOTS, DST_SLOTS = 3, 12, 9, 4, 5
SRC, DST = [3, 4, 5, 9, 1], [2, 3, 7, 6, 1]
SRC_SLOT, DST_SLOT = 2, 3
Pools = list[npt.NDArray[np.uint8]]


def layout(spec: PoolSpec, sending: bool, rank: int, size: int) -> PoolLayout:
    stateful = any(plane.kept is Kept.PER_REQUEST for plane in spec.planes)
    slots = (SRC_SLOTS if sending else DST_SLOTS) if stateful else 0
    pages = SRC_PAGES if sending else DST_PAGES
    return PoolLayout(
        fingerprint="m", spec=spec, num_pages=pages, num_slots=slots, tp_rank=rank, tp_size=size
    )


def whole_planes(spec: PoolSpec, sending: bool, seed: int) -> Pools:
    """Each plane as a node with one rank would hold it: [items, tokens, *entry, bytes of a value]."""
    rng = np.random.default_rng(seed)
    shapes = [
        (each.items, _tokens(each), *each.entry, each.plane.item_bytes)
        for each in layout(spec, sending, 0, 1).placed
    ]
    return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def _tokens(placed: PlacedPlane) -> int:
    return TOKENS if placed.plane.kept is Kept.PAGED else 1


def view(memory: memoryview, placed: PlacedPlane) -> npt.NDArray[np.uint8]:
    flat = np.frombuffer(memory, np.uint8)[placed.offset : placed.offset + placed.nbytes]
    return flat.reshape(placed.items, _tokens(placed), *placed.entry, placed.plane.item_bytes)


def share(plane: Plane, whole: npt.NDArray[np.uint8], rank: int, size: int) -> npt.NDArray[np.uint8]:
    """Return what a rank holds of a plane by definition: its own heads of each group."""
    if not plane.groups:
        return whole
    index: list[int] = []
    base = 0
    for group in plane.groups:
        first = rank * group.heads // size
        last = first + max(1, group.heads // size)
        index += range(base + first * group.width, base + last * group.width)
        base += group.heads * group.width
    return whole.take(index, axis=2 + plane.axis)


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


def sender_of(transport: str, fabric: Fabric | None, name: str) -> SenderEndpoint:
    if fabric is not None:
        return fabric.sender(name)
    kind = transport_kind(transport)
    return make_sender(kind.sender, SenderSetup(name, kind.options(), LIMITS))


def receiver_of(transport: str, fabric: Fabric | None, name: str) -> ReceiverEndpoint:
    if fabric is not None:
        return fabric.receiver(name)
    kind = transport_kind(transport)
    setup = ReceiverSetup(name, kind.options(), LIMITS, "127.0.0.1", 0, None)
    return make_receiver(kind.receiver, setup)


def make(transport: str, spec: PoolSpec, sizes: tuple[int, int], source: Pools) -> Cluster:
    clock = Clock()
    fabric = Fabric(clock) if transport == "loopback" else None
    prefills, decodes = [], []
    for rank in range(sizes[0]):
        name, shape = secrets.token_hex(16), layout(spec, True, rank, sizes[0])
        memory = memoryview(bytearray(shape.total_bytes))
        for placed, plane in zip(shape.placed, source, strict=True):
            view(memory, placed)[:] = share(placed.plane, plane, rank, sizes[0])
        sending = sender_of(transport, fabric, name)
        prefills.append(
            Prefill(clock, sending, incarnation=name, shape=shape, kv=memory, node=f"prefill-{rank}")
        )
    for rank in range(sizes[1]):
        name, shape = secrets.token_hex(16), layout(spec, False, rank, sizes[1])
        taking = receiver_of(transport, fabric, name)
        decodes.append(
            Decode(clock, taking, shape=shape, node=f"decode-{rank}", incarnation=name, record_slots=8)
        )
    cluster = Cluster(prefills, decodes, fabric)
    for decode in decodes:
        for prefill in cluster.peers(decode):
            decode.connect(prefill)
    return cluster


@pytest.fixture(params=["loopback", "shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expect_shares(cluster: Cluster, source: Pools, before: Pools, sent: bool) -> None:
    """Expect that every decode rank holds its share of the source where it was sent, and is unchanged elsewhere."""
    for decode in cluster.decodes:
        assert isinstance(decode.kv, memoryview)
        rank, size = decode.layout.tp_rank, decode.layout.tp_size
        for number, placed in enumerate(decode.layout.placed):
            wanted = share(placed.plane, before[number], rank, size).copy()
            theirs = share(placed.plane, source[number], rank, size)
            if sent and placed.plane.kept is Kept.PAGED:
                wanted[DST] = theirs[SRC]
            elif sent:
                wanted[DST_SLOT] = theirs[SRC_SLOT]
            np.testing.assert_array_equal(view(decode.kv, placed), wanted, placed.plane.where)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", PAIRS, ids=[f"{a}to{b}" for a, b in PAIRS])
def test_every_decode_rank_ends_with_its_share(transport: str, family: str, sizes: tuple[int, int]) -> None:
    spec = PoolSpec(TOKENS, FAMILIES[family])
    source, before = whole_planes(spec, True, 1), whole_planes(spec, False, 2)
    cluster = make(transport, spec, sizes, source)
    try:
        for decode in cluster.decodes:
            assert isinstance(decode.kv, memoryview)
            for placed, plane in zip(decode.layout.placed, before, strict=True):
                view(decode.kv, placed)[:] = share(placed.plane, plane, decode.layout.tp_rank, sizes[1])
        cluster.begin(1)
        cluster.turn_until(Arrived, sizes[1])
        expect_shares(cluster, source, before, sent=True)
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
