"""Numbers and a text in shared memory that ranks show rank 0; one thread of one process writes each."""

from __future__ import annotations

import enum
import mmap
import os

from common.kv_cache.pool_layout import MAX_RANKS

LINE = 16  # numbers of 8 bytes of one rank: two cache lines
TEXT_BYTES = 256  # of one rank
TEXTS = MAX_RANKS * LINE * 8  # where the texts begin
TOTAL = TEXTS + MAX_RANKS * TEXT_BYTES


class BoardField(enum.IntEnum):
    """The numbers of one rank."""

    BEAT = 0  # raised by a thread of its own, so that a long forward does not look like a stopped process
    TURNS = 1  # turns of its main loop
    APPLIED = 2  # frames of the ring of plans that it has applied
    SAVED = 3  # saves that have ended, counted in the order of the plans
    WAITED_US = 4  # microseconds in which its host has waited for other ranks in collectives
    COMPARED = 5  # plans with loads from host memory whose bytes it has compared, in the order of the plans
    DAMAGED = 6  # a bit for each of the 64 newest of them, at their number modulo 64: 1 if bytes had changed
    STORED = 7  # decode nodes: stores in host memory that have ended; COMPARED and DAMAGED are about fetches from it
    STEPS = 8  # times at which it has made progress while it started


class Board:
    """One line of numbers per rank, and a text: what the rank last did while it started."""

    def __init__(self, descriptor: int) -> None:
        """Map the board of a descriptor that this process has."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, TOTAL)
        self._numbers = memoryview(self._map)[:TEXTS].cast("Q")

    @classmethod
    def create(cls) -> Board:
        descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, TOTAL)
        return cls(descriptor)

    def read(self, rank: int, field: BoardField) -> int:
        return self._numbers[rank * LINE + field]

    def write(self, rank: int, field: BoardField, value: int) -> None:
        self._numbers[rank * LINE + field] = value

    def read_text(self, rank: int) -> str:
        """Return the text of a rank, which may be written meanwhile: it is for people only."""
        return self._map[self._text(rank)].rstrip(b"\0").decode(errors="replace")

    def write_text(self, rank: int, text: str) -> None:
        """Write the text of this rank; what exceeds TEXT_BYTES is left out."""
        self._map[self._text(rank)] = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")

    def _text(self, rank: int) -> slice:
        begin = TEXTS + rank * TEXT_BYTES
        return slice(begin, begin + TEXT_BYTES)

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
        os.close(self.descriptor)
