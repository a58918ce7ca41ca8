"""Shares the use of API keys among the router processes of one host, so that limits hold for all of them together.

Each process has a file in the run directory, mapped by all of them, which only it writes: a row per key with totals of
what it has admitted. A process reads the rows of the others whenever it checks a limit, and subtracts what they have
used since. So a request counts everywhere as soon as it is admitted anywhere. Only processes that admit in the same
instant, before either sees the other's row, exceed a limit: by at most one request for each further process.

A process holds a lock on its file while it lives. What a dead one had in flight does not count any more; the process
that follows it goes on with its totals.

Rows of keys that the key file does not have any more become free, each as soon as it has no prompts in flight. They are
used again when the file is full.

Layout, in words of 8 bytes: version, number of rows, number of changes after which readers look at all rows anew; then
per row the digest of the key's id (2), requests, tokens, prompts in flight, and the levels of both buckets with the
monotonic time at which they were written (3).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Collection, Container, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from common.errors import ConfigError

MAX_KEYS = 16_384  # rows of a file, which has 1 MiB
BLOCK = 512  # bytes; unit of st_blocks
LOCK_SECONDS = 2.0  # for which a process waits for the lock on its own file
VERSION = 2  # of the layout
_HEADER, _ROW = 3, 8  # words
_VERSION, _COUNT, _CHANGES = range(3)
_FREE = (2, 0)  # in place of a digest; a digest's first word is odd
_REQUESTS, _TOKENS, _RUNNING, _REQUEST_LEVEL, _TOKEN_LEVEL, _WRITTEN = range(2, 8)
_BYTES = 8 * (_HEADER + MAX_KEYS * _ROW)


class Use(NamedTuple):
    """The amounts of its limits that a key has used."""

    requests: int = 0
    tokens: int = 0
    running: int = 0  # prompts in flight


class Levels(NamedTuple):
    """The remainders of a key's limits at a monotonic time; infinite for a limit that it does not have."""

    requests: float
    tokens: float
    at: float


class KeyLedger(Protocol):
    """The entries of one key."""

    def used(self) -> tuple[int, int]:
        """Return the requests and tokens that other processes have used since the last call."""
        ...

    def running(self) -> int:
        """Return the prompts that other processes have in flight."""
        ...

    def left(self) -> list[Levels]:
        """Return what each process, earlier ones with this number included, had left when it used the key last."""
        ...

    def add(self, use: Use, left: Levels) -> None:
        """Add to what this process has used, and write what is left."""
        ...


class OwnLedger:
    """The entries of a key that only this process serves."""

    def used(self) -> tuple[int, int]:
        return 0, 0

    def running(self) -> int:
        return 0

    def left(self) -> list[Levels]:
        return []

    def add(self, use: Use, left: Levels) -> None:
        pass


class Ledger(Protocol):
    """The entries of all keys."""

    def key(self, identity: str) -> KeyLedger:
        """Return the entries of the key with this id."""
        ...

    def retain(self, identities: Collection[str]) -> None:
        """Drop the entries of all keys but those with these ids."""
        ...


class NoLedger:
    """No other process serves the keys."""

    def key(self, identity: str) -> KeyLedger:
        return OwnLedger()

    def retain(self, identities: Collection[str]) -> None:
        pass


class SharedLedger:
    """The files of all router processes of this host."""

    def __init__(self, own: Path, others: Sequence[Path]) -> None:
        """Take over `own` from an earlier process, or create it. Raises ConfigError."""
        self._own = _File(own)
        self._own.take()
        self.others = [_File(path) for path in others]
        self._retained: Container[tuple[int, int]] | None = None  # None: all

    def key(self, identity: str) -> KeyLedger:
        digest = _digest(identity)
        row = self._own.add(digest)
        if row is None and self._retained is not None:
            # Prompts of removed keys have ended since.
            self._own.free_others(self._retained)
            row = self._own.add(digest)
        # A full file: this process counts the key by itself.
        return OwnLedger() if row is None else _SharedKey(self._own, self.others, digest)

    def retain(self, identities: Collection[str]) -> None:
        self._retained = frozenset(map(_digest, identities))
        self._own.free_others(self._retained)

    def close(self) -> None:
        for each in (self._own, *self.others):
            each.close()


class _SharedKey:
    """One key in all files."""

    def __init__(self, own: _File, others: Sequence[_File], digest: tuple[int, int]) -> None:
        """`own` has a row for the key."""
        self._own = own
        self._others = others
        self._digest = digest
        self._seen = [(0, 0)] * len(others)  # requests, tokens
        # What was used before counts in `left`.
        self.used()

    def used(self) -> tuple[int, int]:
        requests = tokens = 0
        for index, file in enumerate(self._others):
            row = file.find(self._digest)
            seen = self._seen[index]
            now = (0, 0) if row is None else (file.words[row + _REQUESTS], file.words[row + _TOKENS])
            if now[0] < seen[0] or now[1] < seen[1]:
                # The key was removed and added again: its new row began at 0.
                seen = (0, 0)
            self._seen[index] = now
            requests += now[0] - seen[0]
            tokens += now[1] - seen[1]
        return requests, tokens

    def running(self) -> int:
        running = 0
        for file in self._others:
            row = file.find(self._digest)
            if row is not None and file.words[row + _RUNNING] and file.owner_lives():
                running += file.words[row + _RUNNING]
        return running

    def left(self) -> list[Levels]:
        rows = [(file.levels, file.find(self._digest)) for file in (self._own, *self._others)]
        return [
            Levels(levels[row + _REQUEST_LEVEL], levels[row + _TOKEN_LEVEL], levels[row + _WRITTEN])
            for levels, row in rows
            if row is not None and levels[row + _WRITTEN]
        ]

    def add(self, use: Use, left: Levels) -> None:
        words, levels, row = self._own.words, self._own.levels, self._own.find(self._digest)
        if row is None:
            # The key was removed.
            return
        words[row + _REQUESTS] += use.requests
        words[row + _TOKENS] += use.tokens
        words[row + _RUNNING] += use.running
        levels[row + _REQUEST_LEVEL], levels[row + _TOKEN_LEVEL], levels[row + _WRITTEN] = left


class _File:
    """One process's file. `words` and `levels` are the same memory, as int64 and as float64."""

    def __init__(self, path: Path) -> None:
        """Map the file; it is created if it does not exist yet. Raises ConfigError."""
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            found = os.fstat(self._descriptor)
            if min(found.st_size, found.st_blocks * BLOCK) < _BYTES:
                # Without the reservation, a disk that is full later kills this process at the first touch of a page.
                os.posix_fallocate(self._descriptor, 0, _BYTES)
            self._map = mmap.mmap(self._descriptor, _BYTES)
        except OSError as error:
            raise ConfigError("process.run_dir", f"cannot use {path}: {error.strerror}") from error
        self._view = memoryview(self._map)
        self.words = self._view.cast("q")
        self.levels = self._view.cast("d")
        self._rows: dict[tuple[int, int], int] = {}  # digest -> first word of its row
        self._free: list[int] = []  # first words of free rows
        self._read = 0  # rows that were read into the two above
        self._changes = 0  # as of then

    def take(self) -> None:
        """Lock the file for this process and forget what an earlier one had in flight. Raises ConfigError."""
        deadline = time.monotonic() + LOCK_SECONDS
        # Another process may hold the lock for a moment, in `owner_lives`.
        while not self._lock(fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ConfigError(
                    "router.processes", f"another process uses {self._path}; end it, or use another number"
                )
            time.sleep(0.001)
        if self.words[_VERSION] != VERSION:
            self.words[_COUNT], self.words[_CHANGES], self.words[_VERSION] = 0, 0, VERSION
        for index in range(self.words[_COUNT]):
            self.words[_HEADER + index * _ROW + _RUNNING] = 0

    def add(self, digest: tuple[int, int]) -> int | None:
        """Return the first word of the key's row, a new one if it has none; None if the file is full."""
        row = self.find(digest)
        if row is None:
            count = self.words[_COUNT]
            if count < MAX_KEYS:
                row = _HEADER + count * _ROW
                self._write(row, digest)
                self.words[_COUNT] = count + 1
            elif self._free:
                row = self._free.pop()
                self._write(row, digest)
                self.words[_CHANGES] += 1
        return row

    def free_others(self, retained: Container[tuple[int, int]]) -> None:
        """Free the rows of other keys without prompts in flight."""
        self._read_rows()
        words = self.words
        others = [row for digest, row in self._rows.items() if digest not in retained]
        unused = [row for row in others if not words[row + _RUNNING]]
        for row in unused:
            words[row], words[row + 1] = _FREE
        if unused:
            words[_CHANGES] += 1

    def _write(self, row: int, digest: tuple[int, int]) -> None:
        """Begin a row. Nothing counts in it until its digest is there."""
        for word in range(2, _ROW):
            self.words[row + word] = 0
        self.words[row], self.words[row + 1] = digest

    def find(self, digest: tuple[int, int]) -> int | None:
        """Return the first word of the key's row; None if the process has not used the key."""
        self._read_rows()
        return self._rows.get(digest)

    def _read_rows(self) -> None:
        """Read the rows that were added since the last call, or all of them after a change."""
        words = self.words
        if self._changes != words[_CHANGES]:
            self._changes, self._read = words[_CHANGES], 0
            self._rows.clear()
            self._free.clear()
        # The file of an earlier version has other rows.
        count = words[_COUNT] if words[_VERSION] == VERSION else 0
        while self._read < count:
            row = _HEADER + self._read * _ROW
            found = (words[row], words[row + 1])
            if found == (0, 0):
                break  # not written yet, on processors that reorder writes
            self._read += 1
            if found == _FREE:
                self._free.append(row)
            else:
                self._rows[found] = row

    def owner_lives(self) -> bool:
        """Return whether a process has taken the file and has not ended."""
        if not self._lock(fcntl.LOCK_SH):
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        for view in (self.words, self.levels, self._view):
            view.release()
        self._map.close()
        os.close(self._descriptor)

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _digest(identity: str) -> tuple[int, int]:
    """Return two words, never both 0."""
    digest = hashlib.sha256(identity.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) | 1, int.from_bytes(
        digest[8:16], "little", signed=True
    )
