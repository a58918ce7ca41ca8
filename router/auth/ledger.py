"""Shares the use of API keys among the router processes of one host, so that limits hold for all of them together.

Each process has a file in the run directory, mapped by all of them, which only it writes: a row per key with totals of
what it has admitted. A process reads the rows of the others whenever it checks a limit, and subtracts what they have
used since. So a request counts everywhere as soon as it is admitted anywhere. Only processes that admit in the same
instant, before either sees the other's row, exceed a limit: by at most one request for each further process.

A process holds a lock on its file while it lives. What a dead one had in flight does not count any more; the process
that follows it goes on with its totals.

Layout, in words of 8 bytes: version, number of rows; then per row the digest of the key's id (2), requests, tokens,
prompts in flight, and the levels of both buckets with the monotonic time at which they were written (3).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from common.errors import ConfigError

MOST_KEYS = 16_384  # rows of a file; pages that no row uses take no memory
LOCK_SECONDS = 2.0  # for which a process waits for the lock on its own file
VERSION = 1  # of the layout
_HEADER, _ROW = 2, 8  # words
_VERSION, _COUNT = 0, 1
_REQUESTS, _TOKENS, _RUNNING, _REQUEST_LEVEL, _TOKEN_LEVEL, _WRITTEN = range(2, 8)
_BYTES = 8 * (_HEADER + MOST_KEYS * _ROW)


class Use(NamedTuple):
    """Amounts by which a key has used its limits."""

    requests: int = 0
    tokens: int = 0
    running: int = 0  # prompts in flight


class Levels(NamedTuple):
    """The rest of the limits of a key, infinite for one that it does not have, at a monotonic time."""

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


class NoLedger:
    """No other process serves the keys."""

    def key(self, identity: str) -> KeyLedger:
        return OwnLedger()


class SharedLedger:
    """The files of all router processes of this host."""

    def __init__(self, own: Path, others: Sequence[Path]) -> None:
        """Take over `own` from an earlier process, or create it. Raises ConfigError."""
        self._own = _File(own)
        self._own.take()
        self.others = [_File(path) for path in others]

    def key(self, identity: str) -> KeyLedger:
        digest = _digest(identity)
        row = self._own.add(digest)
        # A full file: this process counts the key by itself.
        return OwnLedger() if row is None else _SharedKey(self._own, row, self.others, digest)

    def close(self) -> None:
        for each in (self._own, *self.others):
            each.close()


class _SharedKey:
    """One key in all files."""

    def __init__(self, own: _File, row: int, others: Sequence[_File], digest: tuple[int, int]) -> None:
        self._own = own
        self._row = row
        self._others = others
        self._digest = digest
        self._seen = [(0, 0)] * len(others)  # requests, tokens
        # What was used before counts in `left`.
        self.used()

    def used(self) -> tuple[int, int]:
        requests = tokens = 0
        for index, file in enumerate(self._others):
            row = file.find(self._digest)
            if row is not None:
                seen = self._seen[index]
                now = self._seen[index] = (file.words[row + _REQUESTS], file.words[row + _TOKENS])
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
        words, levels, row = self._own.words, self._own.levels, self._row
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
            if os.fstat(self._descriptor).st_size < _BYTES:
                os.ftruncate(self._descriptor, _BYTES)
            self._map = mmap.mmap(self._descriptor, _BYTES)
        except OSError as error:
            raise ConfigError("process.run_dir", f"cannot use {path}: {error.strerror}") from error
        self._view = memoryview(self._map)
        self.words = self._view.cast("q")
        self.levels = self._view.cast("d")
        self._rows: dict[tuple[int, int], int] = {}  # digest -> first word of its row

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
            self.words[_COUNT], self.words[_VERSION] = 0, VERSION
        for index in range(self.words[_COUNT]):
            self.words[_HEADER + index * _ROW + _RUNNING] = 0

    def add(self, digest: tuple[int, int]) -> int | None:
        """Return the first word of the key's row, a new one if it has none; None if the file is full."""
        row = self.find(digest)
        if row is None:
            count = self.words[_COUNT]
            if count == MOST_KEYS:
                return None
            row = _HEADER + count * _ROW
            for word in range(_ROW):
                self.words[row + word] = 0
            self.words[row], self.words[row + 1] = digest
            self.words[_COUNT] = count + 1
        return row

    def find(self, digest: tuple[int, int]) -> int | None:
        """Return the first word of the key's row; None if the process has not used the key."""
        words, count = self.words, self.words[_COUNT]
        while len(self._rows) < count:
            row = _HEADER + len(self._rows) * _ROW
            found = (words[row], words[row + 1])
            if found == (0, 0):
                break  # not written yet, on processors that reorder writes
            self._rows[found] = row
        return self._rows.get(digest)

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
