"""Bounds and timeouts of the transfer, one frozen value for both sides of it."""

from __future__ import annotations

import msgspec

MIB = 1 << 20


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds are local and monotonic; sizes are bytes. Both nodes should run the same values."""

    # waiting
    handshake_timeout: float = 10.0  # Hello -> Welcome; and a TCP connection that has not proved its key
    slots_timeout: float = 60.0  # sender: without Slots, or a word that the room waits for pages
    first_page_timeout: float = 120.0  # receiver: Slots sent, no page, and no word that the room is worked on
    stall_timeout: float = 10.0  # no progress of posted writes (sender), no page and no word (receiver)
    abort_retry: float = 2.0  # receiver: an unanswered Abort is said again

    # tables that a peer can grow
    max_peers: int = 256  # nodes on the other side
    early_slots: int = 4096  # sender: Slots whose prompt has not come yet, all peers together
    early_slots_per_peer: int = 1024
    early_ttl: float = 30.0  # sender: seconds for which early Slots, ended and aborted rooms are remembered

    # memory
    record_bytes: int = 64 << 10  # one record slot, multiple of 64; see handoff_record.record_bytes
    max_inflight_bytes: int = 64 * MIB  # per peer: written to the network, not yet acknowledged
    max_frame_bytes: int = MIB  # one frame of the TCP transport

    # integrity
    verify_checksums: bool = (
        True  # of every page (page_digest, cuda_pages): made by the sender, checked on arrival
    )

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "verify_checksums" and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, is {getattr(self, name)}")
        if self.record_bytes % 64:
            raise ValueError(f"record_bytes must be a multiple of 64, is {self.record_bytes}")
        if self.max_frame_bytes > self.max_inflight_bytes:
            raise ValueError("max_frame_bytes must not exceed max_inflight_bytes")
