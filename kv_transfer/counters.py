"""Counters of both ends of transfers.

The nodes read some of them, mostly for their metrics (`report.py`). The others are read only by tests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.errors import ChecksumFailed, TransferFailed
from common.observability.histogram import TRANSFER_BYTES, Histogram


@dataclass(slots=True)
class SenderCounters:
    delivered: int = 0  # rooms
    lost: int = 0  # rooms that ended in any other way, cancelled ones included
    pages_written: int = 0
    pages_by_layer: int = 0  # those of pages_written that left while their forward was running
    bytes_written: int = 0
    # of each room that was delivered
    bytes_per_room: Histogram = field(default_factory=lambda: Histogram(TRANSFER_BYTES))
    handshakes: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by cause: version, layout, transport, ...
    malformed: int = 0  # frames that do not decode as a message for this side
    stale_incarnation: int = 0  # frames of a process that was replaced
    duplicate_slots: int = 0
    invalid_slots: int = 0  # pages or record slot outside of the range that Hello described
    ungreeted_slots: int = 0  # of decode nodes that were reported as lost, and must say Hello again
    early_slots: int = 0  # Slots that arrived before their prompt
    early_evicted: int = 0  # those of early_slots that were dropped: too many, or too old
    stalled: int = 0  # rooms given up because no byte moved
    ungranted: int = 0  # rooms given up because the decode node granted no pages in time
    unsent: int = 0  # control frames that the socket did not accept

    def room_delivered(self, nbytes: int) -> None:
        """Count a room that was handed over, and its bytes."""
        self.delivered += 1
        self.bytes_per_room.observe(nbytes)


@dataclass(slots=True)
class ReceiverCounters:
    arrived: int = 0  # rooms
    failed: int = 0  # rooms
    aborted: int = 0  # rooms that the node itself gave up
    pages_received: int = 0
    checksum_failures: int = 0
    record_failures: Counter[str] = field(default_factory=Counter)  # by RecordError.cause
    refused: int = 0  # handshakes
    malformed: int = 0
    stale_incarnation: int = 0
    stale_generation: int = 0
    unknown_room: int = 0
    duplicates: int = 0  # announcements that repeat an earlier one
    gaps: int = 0  # PagesWritten that skips pages: a frame was lost
    timeouts: Counter[str] = field(default_factory=Counter)  # handshake, first_page, stall, deadline
    quarantined: int = 0  # rooms that ever entered quarantine
    abort_retries: int = 0
    unsent: int = 0  # control frames that the socket did not accept

    def record_failed(self, cause: str) -> str:
        """Count a record that failed verification and return the error code of its room."""
        if cause == "checksum":
            self.checksum_failures += 1
            return ChecksumFailed.code
        self.record_failures[cause] += 1
        return TransferFailed.code
