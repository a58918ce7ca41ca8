"""Maps the public keys that may connect to this process to their owners.

The keys directory is the list: NAME.key belongs to NAME. Removing a file revokes the key, replacing it exchanges the
key. Both take effect within CHECK_SECONDS, also on existing connections, since every message carries its key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq.auth

from common.ipc.key_files import public_file

CHECK_SECONDS = 1.0  # between two checks of the files

_Stamp = tuple[int, int, int] | None  # inode, modification time and size; None: the file does not exist


class AllowList:
    """Shared by the ZAP thread and the socket's thread: a reload replaces the whole table."""

    def __init__(
        self, directory: Path, admitted: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`admitted` are the names and patterns that may connect; other files of the directory are not read."""
        self._files = {name: public_file(directory, name) for name in admitted}
        self._clock = clock
        self._lock = threading.Lock()
        self._stamps: dict[str, _Stamp] = {}
        self._names: dict[str, str] = {}  # public key in Z85 -> name
        self._banned: dict[str, float] = {}  # name -> end of the ban
        self._checked_at = -CHECK_SECONDS

    def name_of(self, key: str) -> str | None:
        """Return the owner of a public key (Z85); None for a key that may not connect."""
        self._refresh()
        name = self._names.get(key)
        if name is not None and self._banned and self._banned.get(name, 0.0) > self._clock():
            return None
        return name

    def ban(self, name: str, seconds: float) -> None:
        """Refuse this name's key for `seconds`, on new and existing connections."""
        now = self._clock()
        with self._lock:
            banned = {each: until for each, until in self._banned.items() if until > now}
            self._banned = {**banned, name: now + seconds}

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_SECONDS:
            return
        with self._lock:
            self._checked_at = now
            stamps = {name: _stamp(file) for name, file in self._files.items()}
            if stamps == self._stamps:
                return
            self._stamps = stamps
            names: dict[str, str] = {}
            shared: set[str] = set()
            for name, file in self._files.items():
                try:
                    key = _public_key(file) if stamps[name] is not None else None
                except OSError:
                    # As without a free descriptor. The next check finds another stamp, and reads the file again.
                    key = stamps[name] = None
                if key is None:
                    continue
                if key in names:
                    shared.add(key)
                names[key] = name
            # A key in two files could be used under either name, so it is not admitted.
            self._names = {key: name for key, name in names.items() if key not in shared}


def _stamp(file: Path) -> _Stamp:
    try:
        info = file.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _public_key(file: Path) -> str | None:
    """Return the key; None for a file that is being replaced or is not a key file, whose key is not admitted.

    Raises OSError if it cannot be read.
    """
    try:
        public, _ = zmq.auth.load_certificate(file)
    except ValueError:
        return None
    return public.decode("ascii", errors="replace")
