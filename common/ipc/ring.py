"""A ring of frames in shared memory: one process writes, several read, and every reader gets every frame in order.

The memory is an anonymous file that child processes inherit, so nothing has a name and nothing stays after a crash. It
begins with a page of counters, each in a cache line of its own: the bytes that the writer has published, and the bytes
that each reader has taken. The writer never overwrites what a reader has not taken; it waits, up to a deadline.

A frame is stored in fragments, so that it may be larger than the ring. Each fragment has its number and a checksum. A
reader that sees the published bytes before the fragment itself, as some processors permit, finds a wrong checksum and
looks again. The comparison also orders its loads before the store that lets the writer overwrite them.

Readers may poll `take`, which costs a load, or wait for the descriptor of `fileno`, which every send signals.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from time import monotonic, sleep
from zlib import crc32

import msgspec

from common.errors import RankFailed

PAGE = 4096
LINE = 8  # counters of 8 bytes in a cache line
MAX_READERS = PAGE // (8 * LINE) - 1
FULL_WAIT = 0.00005  # seconds between two looks of a writer without room
MAX_LOOK = 0.1  # seconds that one of them counts at most, as the writer may have been stopped
TORN_SECONDS = 1.0  # after which a fragment with a wrong checksum is a defect
# Payload bytes, checksum, and 2 * number, plus 1 if the frame goes on in the next fragment.
HEADER = struct.Struct("<IIQ")
HEADER_BYTES, pack_header = HEADER.size, HEADER.pack_into


class RingSpec(msgspec.Struct, frozen=True):
    """The descriptors of a ring, as they are numbered in a process that inherits them."""

    memory: int
    bells: tuple[int, ...]  # one eventfd per reader
    capacity: int  # bytes for fragments

    @property
    def descriptors(self) -> Sequence[int]:
        return (self.memory, *self.bells)


class Ring:
    """The memory and the descriptors of one ring in this process."""

    def __init__(self, spec: RingSpec) -> None:
        """Map a ring whose descriptors this process has."""
        self.spec = spec
        self._map = mmap.mmap(spec.memory, PAGE + spec.capacity)
        whole = memoryview(self._map)
        self.counters = whole[:PAGE].cast("Q")
        self.data = whole[PAGE:]
        whole.release()

    @classmethod
    def create(cls, capacity: int, readers: int) -> Ring:
        """Make a ring of at least `capacity` bytes for up to MAX_READERS readers."""
        assert 0 < readers <= MAX_READERS
        capacity = -(-capacity // PAGE) * PAGE
        memory = os.memfd_create("tandem-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, PAGE + capacity)
        bells = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(readers))
        return cls(RingSpec(memory, bells, capacity))

    @property
    def descriptors(self) -> Sequence[int]:
        """The descriptors that another process has to inherit."""
        return self.spec.descriptors

    def close(self) -> None:
        """Unmap the ring and close its descriptors in this process."""
        self.counters.release()
        self.data.release()
        self._map.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


class RingWriter:
    """The only writer of a ring."""

    def __init__(self, ring: Ring, name: str, ranks: Sequence[int]) -> None:
        """Write to `ring`. In errors, `name` says what is written, and `ranks` names the readers."""
        self._ring = ring
        self._name = name
        self._ranks = ranks
        self._counters, self._data, self._capacity = ring.counters, ring.data, ring.spec.capacity
        self._readers = len(ring.spec.bells)
        self._most = ring.spec.capacity // 4 - HEADER_BYTES  # payload of a fragment
        self._number = 0
        self._taken = 0  # bytes that all readers had taken when the writer last looked

    def send(self, frame: bytes | bytearray | memoryview, timeout: float) -> None:
        """Publish a frame of any size. Raises RankFailed if a reader makes no room for `timeout` seconds.

        Only time in which this process runs counts.
        """
        if self._put_at_once(frame):
            self._ring_bells()
            return
        view = memoryview(frame)
        for start in range(0, max(len(view), 1), self._most):
            self._put(view[start : start + self._most], start + self._most < len(view), timeout)
            self._ring_bells()

    def unread(self, reader: int) -> int:
        """Return the bytes that a reader has not taken yet."""
        counters = self._ring.counters
        return counters[0] - counters[(1 + reader) * LINE]

    def _ring_bells(self) -> None:
        for bell in self._ring.spec.bells:
            os.eventfd_write(bell, 1)

    def _put_at_once(self, frame: bytes | bytearray | memoryview) -> bool:
        """Publish a frame that takes one fragment and does not wrap around, if room is known; else return False.

        A plan is written by a thread that has just been woken, so what counts is how little code runs until then.
        """
        counters, data, capacity, size = self._counters, self._data, self._capacity, len(frame)
        head = counters[0]
        taken = _padded(HEADER_BYTES + size)
        at = head % capacity
        if size > self._most or at + taken > capacity or head + taken - capacity > self._taken:
            return False
        number = 2 * self._number
        pack_header(data, at, size, crc32(frame, number & 0xFFFFFFFF), number)
        at += HEADER_BYTES
        data[at : at + size] = frame
        self._number += 1
        counters[0] = head + taken
        return True

    def _put(self, part: memoryview, goes_on: bool, timeout: float) -> None:
        counters, capacity = self._ring.counters, self._ring.spec.capacity
        taken = _padded(HEADER_BYTES + len(part))
        head = counters[0]
        self._wait_for_room(head + taken - capacity, timeout)
        number = 2 * self._number + goes_on
        _write(self._ring.data, head % capacity, HEADER.pack(len(part), _checksum(number, part), number))
        _write(self._ring.data, (head + HEADER_BYTES) % capacity, part)
        self._number += 1
        counters[0] = head + taken

    def _wait_for_room(self, oldest: int, timeout: float) -> None:
        """Wait until all readers have taken the bytes before `oldest`."""
        if oldest <= self._taken:
            return
        waited, looked = 0.0, monotonic()
        while (slowest := self._slowest())[0] < oldest:
            now = monotonic()
            waited, looked = waited + min(now - looked, MAX_LOOK), now
            if waited > timeout:
                reader = slowest[1]
                rank = self._ranks[reader]
                raise RankFailed(
                    rank,
                    f"rank {rank} has not read {self.unread(reader)} bytes of {self._name} in time, and the ring of "
                    f"{self._ring.spec.capacity} bytes is full",
                )
            sleep(FULL_WAIT)
        self._taken = slowest[0]

    def _slowest(self) -> tuple[int, int]:
        """Return (bytes taken, index) of the reader that has taken the fewest."""
        counters = self._ring.counters
        return min((counters[(1 + reader) * LINE], reader) for reader in range(self._readers))


class RingReader:
    """One of the readers of a ring."""

    def __init__(self, ring: Ring, index: int, name: str, rank: int) -> None:
        """Read as reader `index` of the ring. In errors, `name` says what is read, and `rank` is the writer."""
        self._ring = ring
        self._rank = rank
        self._name = name
        self._cursor = (1 + index) * LINE
        self._bell = ring.spec.bells[index]
        self._taken = ring.counters[self._cursor]
        self._number = 0
        self._parts: list[bytes] = []  # of a frame that goes on

    def fileno(self) -> int:
        """Return a descriptor that is readable after a send, until `clear`."""
        return self._bell

    def clear(self) -> None:
        """Make the descriptor unreadable until the next send. Call it before `take`, so that no frame is missed."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return

    def take(self) -> bytes | None:
        """Return the next frame, or None if there is none. Does not wait.

        Raises RankFailed if the ring's memory is damaged.
        """
        counters = self._ring.counters
        while counters[0] != self._taken:
            part, goes_on = self._fragment()
            self._number += 1
            self._taken += _padded(HEADER_BYTES + len(part))
            counters[self._cursor] = self._taken
            if goes_on:
                self._parts.append(part)
            elif self._parts:
                frame = b"".join((*self._parts, part))
                self._parts.clear()
                return frame
            else:
                return part
        return None

    def _fragment(self) -> tuple[bytes, bool]:
        """Return the fragment at the cursor, which has been published, and whether its frame goes on."""
        data, capacity = self._ring.data, self._ring.spec.capacity
        until = 0.0
        while True:
            length, checksum, number = HEADER.unpack(_read(data, self._taken % capacity, HEADER_BYTES))
            if length <= capacity and number >> 1 == self._number:
                part = _read(data, (self._taken + HEADER_BYTES) % capacity, length)
                if _checksum(number, part) == checksum:
                    return part, bool(number & 1)
            now = monotonic()
            until = until or now + TORN_SECONDS
            if now > until:
                raise RankFailed(
                    self._rank, f"fragment {self._number} of {self._name} of rank {self._rank} is damaged"
                )


def _padded(nbytes: int) -> int:
    """Return the bytes that a fragment takes: headers never wrap around the end of the ring."""
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


def _checksum(number: int, part: bytes | memoryview) -> int:
    return crc32(part, number & 0xFFFFFFFF)


def _write(data: memoryview, at: int, part: bytes | memoryview) -> None:
    end, size = at + len(part), len(data)
    if end <= size:
        data[at:end] = part
    else:
        data[at:] = part[: size - at]
        data[: end - size] = part[size - at :]


def _read(data: memoryview, at: int, nbytes: int) -> bytes:
    end, size = at + nbytes, len(data)
    if end <= size:
        return bytes(data[at:end])
    return bytes(data[at:]) + bytes(data[: end - size])
