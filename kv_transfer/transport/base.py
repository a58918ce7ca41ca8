"""The interface of a transport: register memory, describe it to a peer, write into a peer's memory, poll, close.

The receiving side owns two regions: `kv` (the pool, shaped by its PoolLayout) and `records` (slots of
record_bytes). The sending side owns only its pool; a record is passed as bytes.

The state machines rely on these guarantees:
  * a write that is DONE or FAILED is settled: none of its bytes land later, and its source is no longer read;
  * a peer's failure is a FAILED ticket, never an exception of `write` or `poll`;
  * if `revoke` returns True, no byte of that generation lands after it returned, whatever the peer does. If it
    returns False, the pages are safe only after the sender confirmed it, or once `peer_is_dead` returns True.
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
from kv_transfer.page_check import DeviceWork
from kv_transfer.pair_plan import PairPlan, Side
from kv_transfer.transport.description import Description
from kv_transfer.transport.one_host.process import ProcessIdentity
from kv_transfer.transport.page_digest import Digests, HostDigests


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
    """The memory that one generation may write: these pages, one state slot (0: none) and one record slot."""

    generation: int
    incarnation: str  # identifies the only peer that may use it
    pages: frozenset[int]
    record_slot: int
    state_slot: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a GPU; the address is valid only in this process."""

    address: int
    nbytes: int
    device: int  # CUDA ordinal


Memory = memoryview | DeviceMemory  # the two kinds of memory that a pool may be in


Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class SenderSetup(Generic[Options]):
    """Arguments from which a prefill node makes its endpoint."""

    incarnation: str
    options: Options  # the transport's own keys
    limits: TransferLimits


@dataclass(frozen=True, slots=True)
class ReceiverSetup(Generic[Options]):
    """Arguments from which a decode node makes its endpoint."""

    incarnation: str
    options: Options  # the transport's own keys
    limits: TransferLimits
    host: str  # address to which a socket for prefill nodes binds
    port: int  # 0: any
    gpu: int | None  # CUDA ordinal of the pool; None: host memory


class PeerMemory:
    """Handle returned by `attach`; subclasses add what their transport needs."""

    def __init__(self, target: Target) -> None:
        self.target = target


class Ticket:
    """Handle of one write; subclasses add what their transport needs."""


@dataclass(frozen=True, slots=True)
class PageList:
    """Pages of one room: src_pages[i] of this rank's pool is dst_pages[i] of the peer's."""

    src_pages: Sequence[int]
    dst_pages: Sequence[int]
    generation: int


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A posted write of pages, or of the state of one request."""

    ticket: Ticket
    nbytes: int
    digests: Sequence[int] = ()  # checksums of the source; must not be read before the ticket is DONE


def check_size(what: str, memory: Memory, layout: PoolLayout) -> None:
    """Raise ValueError if the pool of `layout` does not fit into `memory`."""
    if memory.nbytes < layout.total_bytes:
        raise ValueError(f"the KV {what} has {memory.nbytes} bytes, its layout needs {layout.total_bytes}")


class _OwnPool:
    """The checksums of an endpoint's own pool, for either side."""

    layout: PoolLayout
    digests: Digests  # set once the layout is known

    def page_digests(self, side: Side, pages: Sequence[int]) -> list[int]:
        """Return the checksums of pages. On a GPU this waits briefly, which posted writes do not."""
        return self.digests.now(side, pages)

    def start_digests(
        self, side: Side, pages: Sequence[int], slot: int
    ) -> tuple[Sequence[int], DeviceWork] | None:
        """Begin to compute the checksums of pages and of a state slot; see `Digests.start`. Raises MemoryError."""
        return self.digests.start(side, pages, slot)

    def state_digest(self, side: Side, slot: int) -> int:
        """Return the checksum of one state slot; waits like `page_digests`."""
        return self.digests.state(side, slot)


class SenderEndpoint(_OwnPool, ABC):
    """A prefill node's side."""

    takes: ClassVar[type[Description]]  # the transport's own description, which `attach` accepts
    kv: memoryview  # the pool, if it is in host memory
    # Its copies of layers (layers.py) wait for the computing stream, so they can be launched while the forward runs.
    waits_for_stream: ClassVar[bool] = False

    def register(self, layout: PoolLayout, kv: Memory) -> None:
        """Set the pool that pages are read from, as flat bytes. Called once, before the first attach."""
        if not isinstance(kv, memoryview):
            raise TypeError(f"{type(self).__name__} reads pages from host memory, not from a GPU")
        check_size("buffer", kv, layout)
        self.layout = layout
        self.kv = kv.cast("B") if kv.format != "B" else kv
        self.digests = HostDigests(self.kv)

    @abstractmethod
    def attach(self, target: Target) -> PeerMemory:
        """Open the peer's memory.

        Raises HandshakeRefused (a sentence) if that is not possible, OSError if this process lacks descriptors or
        memory.
        """

    @abstractmethod
    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        """Start copying from this rank's pool into the peer's. Writes to one peer are executed in order."""

    def write_pages(self, peer: PeerMemory, plan: PairPlan, pages: PageList, checksums: bool) -> PageWrite:
        """Write pages over all planes."""
        digests = self.page_digests(plan.src, pages.src_pages) if checksums else ()
        ticket = self.write(peer, copies(plan, runs(pages.src_pages, pages.dst_pages)), pages.generation)
        return PageWrite(ticket, len(pages.src_pages) * plan.page_bytes, digests)

    def write_state(
        self, peer: PeerMemory, plan: PairPlan, slots: tuple[int, int], generation: int, checksums: bool
    ) -> PageWrite:
        """Write the state of one request over all planes: from this rank's slot (first) to the peer's slot (second)."""
        digests = [self.state_digest(plan.src, slots[0])] if checksums else ()
        ticket = self.write(peer, state_copies(plan, *slots), generation)
        return PageWrite(ticket, plan.state_bytes, digests)

    @abstractmethod
    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        """Start writing `data` at byte `offset` of the peer's record region."""

    @abstractmethod
    def poll(self, ticket: Ticket) -> WriteState:
        """Return the state of a write; never blocks. A settled state does not change."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop what has not started yet, if the transport can; the ticket still has to settle."""
        del ticket

    def abandon(self, ticket: Ticket) -> None:
        """Report a write as FAILED that does not end, if the transport can neither stop it nor bound its time.

        Its bytes may land later, and its source may be read: `writes_ended` returns False for its generation until it
        has ended. Without this the room waits for its ticket.
        """
        del ticket

    @abstractmethod
    def progress(self, peer: PeerMemory) -> int:
        """Return the number of bytes that have landed at this peer so far; it is constant only if nothing moves."""

    def last_error(self, peer: PeerMemory) -> str:
        """Return why the latest write to this peer failed, or "" if the transport does not know."""
        del peer
        return ""

    @abstractmethod
    def detach(self, peer: PeerMemory) -> None:
        """Release the peer's memory. Afterwards all its tickets are settled, unless `writes_ended` returns False."""

    def writes_ended(self, incarnation: str, generation: int | None = None) -> bool:
        """Return False while writes to this decode node may still land although their tickets have settled.

        Without `generation` that is about those that `detach` could not stop; with it about those of this generation,
        abandoned ones included.
        """
        del incarnation, generation
        return True

    @abstractmethod
    def close(self) -> None:
        """Detach all peers."""


class ReceiverEndpoint(_OwnPool, ABC):
    """A decode node's side."""

    kv: Memory
    records: memoryview
    record_bytes: int

    @abstractmethod
    def allocate(self, region: Region, nbytes: int) -> Memory:
        """Return zeroed writable bytes that peers can write to; records are in host memory. Once per region."""

    def open(self, layout: PoolLayout, record_bytes: int) -> None:
        """Start reading both regions by this layout, after both are allocated.

        Transports with pools on GPUs set their `digests` too.
        """
        check_size("region", self.kv, layout)
        self.layout = layout
        self.record_bytes = record_bytes
        if isinstance(self.kv, memoryview):
            self.digests = HostDigests(self.kv)

    def record(self, slot: int) -> bytes:
        """Return a copy of a record slot, so that it cannot change after it was checked."""
        return bytes(self.records[slot * self.record_bytes : (slot + 1) * self.record_bytes])

    @abstractmethod
    def describe(self, incarnation: str) -> Description:
        """Return how this one peer can write into this memory."""

    def admit(self, incarnation: str, process: ProcessIdentity) -> None:
        """Accept a peer that has welcomed this node. Raises HandshakeRefused if its process cannot be watched."""
        del incarnation, process

    def expel(self, incarnation: str) -> None:
        """Disconnect a lost peer, if the transport can, and forget its keys."""
        del incarnation

    @abstractmethod
    def announce(self, window: Window) -> None:
        """Open the window, before its slots are sent to the peer."""

    @abstractmethod
    def revoke(self, generation: int) -> bool:
        """Close the window. True: fenced, no byte lands any longer. False: the sender may still be writing."""

    @abstractmethod
    def peer_is_dead(self, incarnation: str) -> bool:
        """Return True only when this incarnation can never write here again; silence proves nothing."""

    def forget(self, incarnation: str) -> None:
        """Release what is kept for this peer; nothing depends on it any longer."""
        del incarnation

    @abstractmethod
    def close(self) -> None:
        """Withdraw the memory from peers; local views stay valid."""
