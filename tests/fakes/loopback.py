"""A transport within one process, with scripted faults: a fabric connects its endpoints, for tests of what uses one.

Writes land when they are due on the fabric's clock, per pair in the order of posting. The n-th write of the fabric
(from 0, records included) suffers the fault that the plan assigns to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.errors import HandshakeRefused
from kv_transfer.copy_plan import Copy, single_rows
from kv_transfer.transport.base import (
    PeerMemory,
    ReceiverEndpoint,
    Region,
    Target,
    Ticket,
    Window,
    WriteState,
)
from kv_transfer.transport.description import Description, Name
from kv_transfer.transport.layers import HostEndpoint

Damage = Literal["none", "drop", "fail", "truncate", "corrupt", "duplicate", "stick"]


class LoopbackDescription(Description, frozen=True, tag="loopback"):
    """Describes memory of the same process."""

    incarnation: Name


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault that one write suffers."""

    delay: float = 0.0  # seconds until it lands
    damage: Damage = "none"
    # drop: reported done, nothing landed      truncate: reported done, half of it landed
    # corrupt: reported done, one byte differs  duplicate: lands twice before it is done
    # fail: half of it lands, reported failed  stick: never settles, and lands only after `Fabric.unstick`


Observer = Callable[[str, Region, int, int, int], None]  # receiver, region, start, length, generation


@dataclass(slots=True, eq=False)
class _LoopbackWrite(Ticket):
    memory: _Attached
    region: Region
    pieces: list[tuple[int, bytes]]  # destination offset, bytes as they were when it was posted
    generation: int
    due: float
    damage: Damage
    state: WriteState = WriteState.PENDING


class _Attached(PeerMemory):
    def __init__(self, target: Target, sender: LoopbackSender, receiver: LoopbackReceiver) -> None:
        super().__init__(target)
        self.sender = sender
        self.receiver = receiver
        self.moved = 0
        self.pending: list[_LoopbackWrite] = []


@dataclass(slots=True)
class Fabric:
    """Connects the loopback endpoints of one test."""

    clock: Callable[[], float]
    plan: Callable[[int], Fault] = lambda _: Fault()
    observers: list[Observer] = field(default_factory=list)  # called before bytes land
    receivers: dict[str, LoopbackReceiver] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)  # incarnations of senders
    abandons: bool = False  # tickets of writes that do not end may settle before them, as with nixl
    attached: list[_Attached] = field(default_factory=list)
    writes: int = 0

    def sender(self, incarnation: str) -> LoopbackSender:
        return LoopbackSender(self, incarnation)

    def receiver(self, incarnation: str, *, fencing: bool = False) -> LoopbackReceiver:
        receiver = self.receivers[incarnation] = LoopbackReceiver(self, fencing)
        return receiver

    def kill(self, sender_incarnation: str) -> None:
        """End the sender's process: what has not landed, or is posted from now on, never lands."""
        self.dead.add(sender_incarnation)
        for memory in self.attached:
            if memory.sender.incarnation == sender_incarnation:
                memory.pending.clear()

    def unstick(self) -> None:
        """Let every stuck write land now."""
        for memory in self.attached:
            for write in memory.pending:
                if write.damage == "stick":
                    write.damage, write.due = "none", self.clock()

    def advance(self) -> None:
        """Land the writes that are due."""
        for memory in self.attached:
            while memory.pending:
                write = memory.pending[0]
                if write.damage == "stick" or write.due > self.clock():
                    break
                memory.pending.pop(0)
                self._land(write)

    def _land(self, write: _LoopbackWrite) -> None:
        receiver = write.memory.receiver
        if receiver.fencing and write.generation not in receiver.windows:
            self._settle(write, WriteState.FAILED)
            return
        pieces = {"drop": [], "truncate": _half(write.pieces), "fail": _half(write.pieces)}.get(
            write.damage, write.pieces
        )
        if write.damage == "corrupt" and pieces:
            offset, data = pieces[0]
            pieces = [(offset, bytes([data[0] ^ 0x40]) + data[1:]), *pieces[1:]]
        region = receiver.kv if write.region is Region.KV else receiver.records
        for _ in range(2 if write.damage == "duplicate" else 1):
            for offset, data in pieces:
                for observer in self.observers:
                    incarnation = write.memory.target.incarnation
                    observer(incarnation, write.region, offset, len(data), write.generation)
                region[offset : offset + len(data)] = data
        write.memory.moved += sum(len(data) for _, data in pieces)
        self._settle(write, WriteState.FAILED if write.damage == "fail" else WriteState.DONE)

    def _settle(self, write: _LoopbackWrite, state: WriteState) -> None:
        if write.state is WriteState.PENDING:
            write.state = state


class LoopbackSender(HostEndpoint):
    takes = LoopbackDescription

    def __init__(self, fabric: Fabric, incarnation: str) -> None:
        self.fabric = fabric
        self.incarnation = incarnation

    def attach(self, target: Target) -> PeerMemory:
        description = target.description
        assert isinstance(description, LoopbackDescription)
        receiver = self.fabric.receivers.get(description.incarnation)
        if (
            receiver is None
            or receiver.kv.nbytes < target.kv_bytes
            or receiver.records.nbytes < target.records_bytes
        ):
            raise HandshakeRefused("its memory cannot be found")
        memory = _Attached(target, self, receiver)
        self.fabric.attached.append(memory)
        return memory

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        pieces = [(row.dst, bytes(self.kv[row.src : row.src + row.length])) for row in single_rows(copies)]
        return self._post(peer, Region.KV, pieces, generation)

    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        return self._post(peer, Region.RECORDS, [(offset, data)], generation)

    def poll(self, ticket: Ticket) -> WriteState:
        assert isinstance(ticket, _LoopbackWrite)
        self.fabric.advance()
        return ticket.state

    def progress(self, peer: PeerMemory) -> int:
        assert isinstance(peer, _Attached)
        return peer.moved

    def abandon(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _LoopbackWrite)
        if self.fabric.abandons and ticket.state is WriteState.PENDING:
            ticket.state = WriteState.FAILED

    def writes_ended(self, incarnation: str, generation: int | None = None) -> bool:
        self.fabric.advance()
        return generation is None or not any(
            write.generation == generation
            for memory in self.fabric.attached
            if memory.sender is self and memory.target.incarnation == incarnation
            for write in memory.pending
        )

    def detach(self, peer: PeerMemory) -> None:
        assert isinstance(peer, _Attached)
        for write in peer.pending:
            write.state = WriteState.FAILED
        peer.pending.clear()
        if peer in self.fabric.attached:
            self.fabric.attached.remove(peer)

    def close(self) -> None:
        for memory in [each for each in self.fabric.attached if each.sender is self]:
            self.detach(memory)

    def _post(
        self, peer: PeerMemory, region: Region, pieces: list[tuple[int, bytes]], generation: int
    ) -> Ticket:
        assert isinstance(peer, _Attached)
        fault = self.fabric.plan(self.fabric.writes)
        self.fabric.writes += 1
        write = _LoopbackWrite(
            peer, region, pieces, generation, self.fabric.clock() + fault.delay, fault.damage
        )
        if peer in self.fabric.attached and self.incarnation not in self.fabric.dead:
            peer.pending.append(write)
            self.fabric.advance()
        else:
            write.state = WriteState.FAILED
        return write


class LoopbackReceiver(ReceiverEndpoint):
    """With `fencing`, windows are enforced as in tcp; without it they are not, as in shm."""

    kv: memoryview

    def __init__(self, fabric: Fabric, fencing: bool) -> None:
        self.fabric = fabric
        self.fencing = fencing
        self.windows: dict[int, Window] = {}

    def allocate(self, region: Region, nbytes: int) -> memoryview:
        view = memoryview(bytearray(nbytes))
        if region is Region.KV:
            self.kv = view
        else:
            self.records = view
        return view

    def describe(self, incarnation: str) -> LoopbackDescription:
        return LoopbackDescription(next(name for name, each in self.fabric.receivers.items() if each is self))

    def announce(self, window: Window) -> None:
        self.windows[window.generation] = window

    def revoke(self, generation: int) -> bool:
        self.windows.pop(generation, None)
        return self.fencing

    def peer_is_dead(self, incarnation: str) -> bool:
        return incarnation in self.fabric.dead

    def close(self) -> None:
        for memory in [each for each in self.fabric.attached if each.receiver is self]:
            memory.sender.detach(memory)


def _half(pieces: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the first half of the bytes, cut in the middle of a piece."""
    left = sum(len(data) for _, data in pieces) // 2
    kept: list[tuple[int, bytes]] = []
    for offset, data in pieces:
        if left <= 0:
            break
        kept.append((offset, data[:left]))
        left -= len(data)
    return kept
