"""One prefill node and one decode node of several ranks each, in one thread; a test decides which rank has a turn.

Frames between ranks wait in queues until the rank that receives them has a turn, so that a rank can lag.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from common.messages.identity import NodeRef, rank_incarnation, routing_id
from kv_transfer.events import Arrived, ReceiverEvent, SenderEvent, SlotsGranted
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.limits import TransferLimits
from kv_transfer.ranks.receiver_group import ReceiverGroup
from kv_transfer.ranks.receiver_rank import ReceiverRank
from kv_transfer.ranks.sender_group import SenderGroup
from kv_transfer.ranks.sender_rank import SenderRank
from kv_transfer.receiver import Receiver
from kv_transfer.receiving import PageReceiver
from kv_transfer.send_order import SendOrder
from kv_transfer.sender import Sender
from kv_transfer.sending import PageSender
from kv_transfer.transport.base import Region
from prefill_node.page_sending import ByChunk
from tests.fakes.loopback import Fabric
from tests.fakes.waiting import PATIENCE
from tests.unit.kv_transfer.rig import LIMITS, Clock
from tests.unit.kv_transfer.shares import (
    DST,
    DST_SLOT,
    SRC,
    SRC_SLOT,
    Pools,
    fill_shares,
    layout,
    receiver_of,
    sender_of,
)

RECORD = HandoffRecord(
    first_token=7,
    num_tokens=9,
    cached_tokens=2,
    draft_topk_probs=(0.5,),
    draft_topk_ids=(4,),
    draft_hidden=b"\1\2",
    draft_hidden_dtype="float16",
)
RECORD_SLOTS = 16


class Queue:
    """A channel of one writer to several readers, or of one rank to rank 0."""

    def __init__(self, readers: int) -> None:
        self.readers = [QueueReader() for _ in range(readers)]

    def send(self, frame: bytes, patience: float, /) -> None:
        assert patience > 0
        for reader in self.readers:
            reader.frames.append(frame)


class QueueReader:
    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()

    def take(self) -> bytes | None:
        return self.frames.popleft() if self.frames else None

    def fileno(self) -> int:
        return -1

    def clear(self) -> None:
        pass


@dataclass(eq=False)
class PrefillRank:
    """A sender, and the peer socket that decode ranks connect to."""

    number: int
    incarnation: str
    sender: Sender
    clients: dict[bytes, Callable[[str, bytes], None]] = field(default_factory=dict)
    inbox: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    dead: bool = False

    def listen(self) -> None:
        while self.inbox:
            self.sender.handle(*self.inbox.popleft())


class PrefillSide:
    """The node: `orders` are given as soon as pages are granted, for plan `after`, which a test completes."""

    def __init__(
        self, spec: PoolSpec, size: int, transport: str, fabric: Fabric | None, source: Pools
    ) -> None:
        self.clock = Clock()
        self.name, self.leader = "prefill-0", secrets.token_hex(16)
        self.spec = spec
        self.addresses = [f"mem://{rank}" for rank in range(size)]
        self.ranks = [self._rank(rank, size, transport, fabric, source) for rank in range(size)]
        self.commands = Queue(size - 1)
        self.reports = [Queue(1) for _ in range(size - 1)]
        own = self.ranks[0].sender
        own.addresses = tuple(self.addresses)
        self.group: SenderGroup | None = None
        if size > 1:
            readers = [each.readers[0] for each in self.reports]
            self.group = SenderGroup(own, self.addresses, self.commands, readers)
        self.node: PageSender = self.group or own
        self.services = [
            SenderRank(rank.sender, rank.listen, ByChunk(rank.sender).send, reader, report)
            for rank, reader, report in zip(self.ranks[1:], self.commands.readers, self.reports, strict=True)
        ]
        self.after, self.completed = 0, [0] * size  # the plan of new orders; newest complete plan per rank
        self.gives_orders = True
        self.events: list[SenderEvent] = []
        self.src: dict[int, Sequence[int]] = {}

    def _rank(
        self, rank: int, size: int, transport: str, fabric: Fabric | None, source: Pools
    ) -> PrefillRank:
        incarnation, shape = rank_incarnation(self.leader, rank), layout(self.spec, True, rank, size)
        memory = memoryview(bytearray(shape.total_bytes))
        fill_shares(memory, shape, source)
        endpoint = sender_of(transport, fabric, incarnation)
        endpoint.register(shape, memory)

        def send(identity: bytes, frame: bytes) -> bool:
            deliver = self.ranks[rank].clients.get(identity)
            if deliver is None or self.ranks[rank].dead:
                return False
            deliver(incarnation, frame)
            return True

        sender = Sender(self.leader, self.name, endpoint, shape, send, self.clock, LIMITS)
        return PrefillRank(rank, incarnation, sender)

    def expect(self, room: int, decode: str, src: Sequence[int] = SRC) -> None:
        self.src[room] = src
        self.node.expect(room, None, (decode,))

    def order(self, room: int) -> None:
        """Order all pages in two parts, then the record."""
        slots = self.node.slots(room)
        if slots is None:
            return
        src, held = self.src[room], slots.held_pages
        slot = SRC_SLOT if self.ranks[0].sender.endpoint.layout.num_slots else 0
        for first, pages, last in ((held, src[:2], False), (held + 2, src[2:], True)):
            order = SendOrder(
                room=room,
                generation=slots.generation,
                after=self.after,
                complete=first + len(pages),
                first=first,
                pages=tuple(pages),
                record=RECORD if last else None,
                slot=slot if last else 0,
            )
            if self.group is not None:
                self.group.order(order)
            ByChunk(self.ranks[0].sender).send(order)

    def turn(self, rank: int) -> None:
        if self.ranks[rank].dead:
            return
        if rank > 0:
            self.services[rank - 1].turn(self.completed[rank])
            return
        self.ranks[0].listen()
        for event in self.node.poll():
            self.events.append(event)
            if isinstance(event, SlotsGranted) and self.gives_orders:
                self.order(event.room)


class Sockets:
    """The connections of a decode rank to prefill ranks: what PeerConnections does, in queues."""

    def __init__(self, side: DecodeSide, rank: int) -> None:
        self._side = side
        self._rank = rank
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.open: set[str] = set()
        self.gone: set[str] = set()

    @property
    def connected(self) -> frozenset[str]:
        return frozenset(self.open)

    def ensure(self, peer: NodeRef) -> None:
        if peer.incarnation not in self.open or peer.incarnation in self.gone:
            send = self.dial(peer.incarnation, peer.peer_address)
            self._side.receiver_of(self._rank).connect(peer.incarnation, send, self.dial)

    def dial(self, incarnation: str, address: str) -> Callable[[bytes], object]:
        prefill = self._side.prefill.ranks[int(address.rpartition("/")[2])]
        own = rank_incarnation(self._side.leader, self._rank)
        identity = routing_id(self._side.name, own, incarnation).encode()
        prefill.clients[identity] = lambda _, frame: self.inbox.append((incarnation, frame))
        self.open.add(incarnation)
        self.gone.discard(incarnation)
        return lambda frame: prefill.inbox.append((identity, frame))

    def pump(self) -> None:
        while self.inbox:
            self._side.receiver_of(self._rank).handle(*self.inbox.popleft())

    def lost(self, incarnation: str) -> None:
        if incarnation in self.open:
            self.gone.add(incarnation)
        self._side.receiver_of(self._rank).peer_lost(incarnation)

    def close_unused(self, needed: Container[str]) -> None:
        for incarnation in [each for each in self.gone if each not in needed]:
            self.gone.discard(incarnation)
            self.open.discard(incarnation)


class DecodeSide:
    def __init__(
        self,
        prefill: PrefillSide,
        size: int,
        transport: str,
        fabric: Fabric | None,
        *,
        before: Pools | None = None,
        limits: TransferLimits = LIMITS,
        record_slots: int = RECORD_SLOTS,
    ) -> None:
        self.prefill, self.name, self.leader = prefill, "decode-0", secrets.token_hex(16)
        self.pools: list[tuple[memoryview, PoolLayout]] = []
        self.receivers: list[Receiver] = []
        for rank in range(size):
            shape = layout(prefill.spec, False, rank, size)
            endpoint = receiver_of(transport, fabric, rank_incarnation(self.leader, rank))
            memory = endpoint.allocate(Region.KV, shape.total_bytes)
            assert isinstance(memory, memoryview)
            if before is not None:
                fill_shares(memory, shape, before)
            self.pools.append((memory, shape))
            clock, name = prefill.clock, self.name
            made = Receiver(self.leader, name, endpoint, shape, clock, limits, record_slots)
            self.receivers.append(made)
        self.sockets = [Sockets(self, rank) for rank in range(size)]
        self.commands = Queue(size - 1)
        self.reports = [Queue(1) for _ in range(size - 1)]
        self.node: PageReceiver = self.receivers[0]
        if size > 1:
            readers = [each.readers[0] for each in self.reports]
            shape = self.pools[0][1]
            self.node = ReceiverGroup(self.receivers[0], shape, record_slots, self.commands, readers)
        self.services = [
            ReceiverRank(receiver, shape, sockets, reader, report)
            for receiver, (_, shape), sockets, reader, report in zip(
                self.receivers[1:],
                self.pools[1:],
                self.sockets[1:],
                self.commands.readers,
                self.reports,
                strict=True,
            )
        ]
        self.events: list[ReceiverEvent] = []

    def receiver_of(self, rank: int) -> PageReceiver:
        """Return what the sockets of a rank talk to."""
        return self.node if rank == 0 else self.receivers[rank]

    def connect(self) -> None:
        ref = NodeRef(
            name=self.prefill.name,
            role="prefill",
            incarnation=self.prefill.leader,
            peer_address=self.prefill.addresses[0],
        )
        self.sockets[0].ensure(ref)

    def open(self, room: int, pages: Sequence[int] = DST, held: int = 1, slot: int = DST_SLOT) -> int:
        slot = slot if self.pools[0][1].num_slots else 0
        return self.node.open(room, (self.prefill.leader,), pages, held, None, slot)

    def turn(self, rank: int) -> None:
        if rank > 0:
            self.services[rank - 1].turn()
            return
        self.sockets[0].pump()
        for event in self.node.poll():
            self.events.append(event)
            if isinstance(event, Arrived):
                self.node.close(event.room)


class Nodes:
    """Both sides; a decode node that has said Hello. Close it."""

    def __init__(
        self,
        spec: PoolSpec,
        sizes: tuple[int, int],
        transport: str,
        source: Pools,
        *,
        before: Pools | None = None,
        limits: TransferLimits = LIMITS,
    ) -> None:
        clock = Clock()
        self.fabric = Fabric(clock) if transport == "loopback" else None
        self.prefill = PrefillSide(spec, sizes[0], transport, self.fabric, source)
        self.prefill.clock.now = clock.now
        self.fabric_clock = clock
        self.decode = DecodeSide(self.prefill, sizes[1], transport, self.fabric, before=before, limits=limits)
        self.decode.connect()

    def turn(self, skip: Iterable[str] = ()) -> None:
        """Give every rank a turn, except those skipped: "p1" is rank 1 of the prefill node."""
        for rank in range(len(self.prefill.ranks)):
            if f"p{rank}" not in skip:
                self.prefill.turn(rank)
        for rank in range(len(self.decode.receivers)):
            if f"d{rank}" not in skip:
                self.decode.turn(rank)

    def turns(self, count: int = 12, skip: Iterable[str] = ()) -> None:
        for _ in range(count):
            self.turn(skip)

    def until(self, done: Callable[[], bool], skip: Iterable[str] = ()) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, (self.prefill.events, self.decode.events)
            self.turn(skip)

    def prefill_count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.prefill.events)

    def decode_count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.decode.events)

    def holds_nothing(self) -> bool:
        """True if no rank of either side holds anything of any room."""
        return (
            self.decode.node.active == 0
            and all(each.active == 0 and each.rooms.holds_nothing for each in self.decode.receivers)
            and all(rank.sender.active == 0 for rank in self.prefill.ranks if not rank.dead)
            and (self.prefill.group is None or self.prefill.group.active == 0)
            and not any(service.busy for service in self.prefill.services)
        )

    def close(self) -> None:
        for rank in self.prefill.ranks:
            rank.sender.close()
        for receiver in self.decode.receivers:
            receiver.shutdown()
