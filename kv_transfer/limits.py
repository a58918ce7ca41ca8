"""Bounds and timeouts of a transfer: one frozen value that both ends use."""

from __future__ import annotations

import msgspec

MIB = 1 << 20


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds are local and monotonic; sizes are bytes. Both nodes should run the same values."""

    # waiting
    # Seconds between Hello and Welcome, and until a TCP connection has to prove its key.
    handshake_timeout: float = 10.0
    # Sender: seconds without Slots and without Queued, the message that the room still waits for pages.
    slots_timeout: float = 60.0
    # Receiver: seconds after Slots without a page and without Working, the message that the room is processed.
    first_page_timeout: float = 120.0
    # Sender: seconds in which no posted write makes progress. Receiver: seconds without a page or Working.
    stall_timeout: float = 10.0
    abort_retry: float = 2.0  # receiver: an unanswered AbortTransfer is repeated after this time

    # tables that a peer can grow
    max_peers: int = 256  # nodes on the other side
    early_slots: int = 4096  # sender: Slots that arrived before their prompt, all peers together
    early_slots_per_peer: int = 1024
    # Sender: seconds for which early Slots and ended and aborted rooms are remembered.
    early_ttl: float = 30.0

    # memory
    record_bytes: int = 64 << 10  # one record slot, multiple of 64; see handoff_record.record_bytes
    max_inflight_bytes: int = 64 * MIB  # per peer: sent and not yet acknowledged
    max_frame_bytes: int = MIB  # one frame of the TCP transport

    # integrity: the sender computes a checksum of every page (page_digest, cuda.pages), the receiver compares it
    verify_checksums: bool = True

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "verify_checksums" and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, is {getattr(self, name)}")
        if self.record_bytes % 64:
            raise ValueError(f"record_bytes must be a multiple of 64, is {self.record_bytes}")
        if self.max_frame_bytes > self.max_inflight_bytes:
            raise ValueError("max_frame_bytes must not exceed max_inflight_bytes")

    def with_inflight(self, mib: int) -> TransferLimits:
        """Return these limits with a transport's own bound of bytes that are in flight per peer."""
        return msgspec.structs.replace(self, max_inflight_bytes=mib * MIB)
