"""What a transport is. Five verbs: register memory, describe it to a peer, write into a peer's, poll, close.

The receiving side owns two regions: `kv` (the pool, shaped by its PoolLayout) and `records` (slots of
record_bytes). The sending side owns its pool alone; a record is handed over as bytes.

What the state machines rely on:
  * a write that is DONE or FAILED is settled: no byte of it will land any more, its source is not read any
    more;
  * a peer's failure is a FAILED ticket, never an exception of `write` or `poll`;
  * where `revoke` answers True, no byte of that generation lands after it returned, whatever the peer does.
    Where it answers False the pages are safe only after the sender said so, or once `proves_dead` is True.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.copy_plan import Copy, copies, runs, state_copies
from kv_transfer.limits import TransferLimits
from kv_transfer.pair_plan import PairPlan, Side
from kv_transfer.transport.description import Description
from kv_transfer.transport.one_host.process import ProcessIdentity
from kv_transfer.transport.page_digest import block_digests


class Region(enum.StrEnum):
    KV = "kv"
    RECORDS = "records"


class WriteState(enum.Enum):
    PENDING = "pending"
    DONE = "done"  # settled: every byte landed
    FAILED = "failed"  # settled: some bytes did not land


@dataclass(frozen=True, slots=True)
class Target:
    """A receiver's memory as its Hello described it."""

    incarnation: str
    description: Description
    kv_bytes: int
    records_bytes: int


@dataclass(frozen=True, slots=True)
class Window:
    """What one generation may write: these pages, one state slot (0: none) and one record slot."""

    generation: int
    incarnation: str  # of the only peer that may use it
    pages: frozenset[int]
    record_slot: int
    state_slot: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a GPU; the address means something to this process alone."""

    address: int
    nbytes: int
    device: int  # CUDA ordinal


Memory = memoryview | DeviceMemory  # where a pool may lie


Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class SenderSetup(Generic[Options]):
    """What a prefill node makes its endpoint from."""

    incarnation: str
    options: Options  # the transport's own keys
    limits: TransferLimits


@dataclass(frozen=True, slots=True)
class ReceiverSetup(Generic[Options]):
    """What a decode node makes its endpoint from."""

    incarnation: str
    options: Options  # the transport's own keys
    limits: TransferLimits
    host: str  # what a socket for prefill nodes binds to
    port: int  # 0: any
    gpu: int | None  # CUDA ordinal of the pool; None: host memory


class PeerMemory:
    """Handle made by `attach`; subclasses carry what their transport needs."""

    def __init__(self, target: Target) -> None:
        self.target = target


class Ticket:
    """Handle of one write; subclasses carry what their transport needs."""


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A posted write of pages, or of the state of one request."""

    ticket: Ticket
    nbytes: int
    digests: Sequence[int] = ()  # checksums of what it reads; not to be read before the ticket is DONE


class SenderEndpoint(ABC):
    """A prefill node's side."""

    takes: ClassVar[type[Description]]  # what `attach` is given: the transport's own description
    kv: memoryview  # the pool, where it lies in host memory
    layout: PoolLayout

    def register(self, layout: PoolLayout, kv: Memory) -> None:
        """The pool that pages are read from: flat bytes. Once, before the first attach."""
        if not isinstance(kv, memoryview):
            raise TypeError(f"{type(self).__name__} reads pages from host memory, not from a GPU")
        if kv.nbytes < layout.total_bytes:
            raise ValueError(f"the KV buffer has {kv.nbytes} bytes, its layout needs {layout.total_bytes}")
        self.layout = layout
        self.kv = kv.cast("B") if kv.format != "B" else kv

    def page_digests(self, side: Side, pages: Sequence[int]) -> list[int]:
        """Checksums of pages of the own pool."""
        return block_digests(self.kv, side.pages, pages)

    def state_digest(self, side: Side, slot: int) -> int:
        """The checksum of one state slot of the own pool."""
        return block_digests(self.kv, side.state, [slot])[0]

    @abstractmethod
    def attach(self, target: Target) -> PeerMemory:
        """Open the peer's memory. Raises HandshakeRefused (a sentence) if it cannot be reached."""

    @abstractmethod
    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        """Start copying from the own pool into the peer's. Writes to one peer are carried out in order."""

    def write_pages(
        self,
        peer: PeerMemory,
        plan: PairPlan,
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
        generation: int,
        checksums: bool,
    ) -> PageWrite:
        """`write` of pages, over all planes: src_pages[i] of the own pool to dst_pages[i] of the peer's."""
        digests = self.page_digests(plan.src, src_pages) if checksums else ()
        ticket = self.write(peer, copies(plan, runs(src_pages, dst_pages)), generation)
        return PageWrite(ticket, len(src_pages) * plan.page_bytes, digests)

    def write_state(
        self, peer: PeerMemory, plan: PairPlan, slots: tuple[int, int], generation: int, checksums: bool
    ) -> PageWrite:
        """`write` of the state of one request, over all planes: from the first slot to the peer's second one."""
        digests = [self.state_digest(plan.src, slots[0])] if checksums else ()
        ticket = self.write(peer, state_copies(plan, *slots), generation)
        return PageWrite(ticket, plan.state_bytes, digests)

    @abstractmethod
    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        """Start writing `data` at byte `offset` of the peer's record region."""

    @abstractmethod
    def poll(self, ticket: Ticket) -> WriteState:
        """Never blocks; stays what it is once settled."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop what has not started yet, where the transport can; the ticket still has to settle."""
        del ticket

    @abstractmethod
    def progress(self, peer: PeerMemory) -> int:
        """Bytes that have landed at this peer so far: stands still only if nothing moves."""

    def trouble(self, peer: PeerMemory) -> str:
        """Why the latest write to this peer failed, where the transport knows."""
        del peer
        return ""

    @abstractmethod
    def detach(self, peer: PeerMemory) -> None:
        """Let go of the peer's memory: afterwards all its tickets are settled, or `quiet` says that they are not."""

    def quiet(self, incarnation: str) -> bool:
        """False while writes to this decode node may land that `detach` could not stop."""
        del incarnation
        return True

    @abstractmethod
    def close(self) -> None:
        """Detach everything."""


class ReceiverEndpoint(ABC):
    """A decode node's side."""

    kv: Memory
    records: memoryview
    layout: PoolLayout
    record_bytes: int

    @abstractmethod
    def allocate(self, region: Region, nbytes: int) -> Memory:
        """Zeroed writable bytes that peers can be let into; records are always in host memory. Once each."""

    def open(self, layout: PoolLayout, record_bytes: int) -> None:
        """Both regions are allocated: from here on they are read by this layout."""
        if self.kv.nbytes < layout.total_bytes:
            raise ValueError(
                f"the KV region has {self.kv.nbytes} bytes, its layout needs {layout.total_bytes}"
            )
        self.layout = layout
        self.record_bytes = record_bytes

    def page_digests(self, side: Side, pages: Sequence[int]) -> list[int]:
        """Checksums of pages of the own pool."""
        return block_digests(self._host_kv, side.pages, pages)

    def state_digest(self, side: Side, slot: int) -> int:
        """The checksum of one state slot of the own pool."""
        return block_digests(self._host_kv, side.state, [slot])[0]

    @property
    def _host_kv(self) -> memoryview:
        if not isinstance(self.kv, memoryview):
            raise TypeError(f"{type(self).__name__} must read its pages from the GPU")
        return self.kv

    def record(self, slot: int) -> bytes:
        """A copy of a record slot: what is checked cannot change afterwards."""
        return bytes(self.records[slot * self.record_bytes : (slot + 1) * self.record_bytes])

    @abstractmethod
    def describe(self, incarnation: str) -> Description:
        """The way into this memory, for this one peer."""

    def admit(self, incarnation: str, process: ProcessIdentity) -> None:
        """The peer welcomed us; it is this process. Raises HandshakeRefused if it cannot be watched."""
        del incarnation, process

    def expel(self, incarnation: str) -> None:
        """The peer counts as lost: cut it off, where the transport can, and forget its keys."""
        del incarnation

    @abstractmethod
    def announce(self, window: Window) -> None:
        """Open the window: the peer will be told of these slots."""

    @abstractmethod
    def revoke(self, generation: int) -> bool:
        """Shut the window. True: fenced, no byte lands any more. False: the sender may be writing still."""

    @abstractmethod
    def proves_dead(self, incarnation: str) -> bool:
        """True only when this incarnation can never write here again; silence proves nothing."""

    def forget(self, incarnation: str) -> None:
        """Nothing depends on this peer any more."""
        del incarnation

    @abstractmethod
    def close(self) -> None:
        """Withdraw the memory from peers; local views stay valid."""
