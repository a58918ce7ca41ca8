"""The API keys of a cluster, looked up by the hash of what a client sends, and reloaded when their file changes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from pathlib import Path

from common.api_key import ApiKey
from common.errors import ConfigError
from common.observability.logs import Log

CHECK_SECONDS = 1.0  # interval at which the file is checked for changes


class KeyRing:
    """All keys that are valid now. `now` returns Unix seconds and is compared with `expires`."""

    def __init__(self, keys: Sequence[ApiKey], now: Callable[[], float]) -> None:
        self._now = now
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]

    def find(self, secret: str) -> ApiKey | None:
        """Return the entry of a key unless it has expired. The time taken is the same for known and unknown keys."""
        digest = hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
        found: ApiKey | None = None
        for expected, key in self._keys:
            if hmac.compare_digest(expected, digest):
                found = key
        if found is not None and found.expires is not None and found.expires.timestamp() <= self._now():
            return None
        return found


class KeyFile:
    """Reloads the key file when it changes, without a restart.

    While it cannot be read, the previous keys stay valid.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Sequence[ApiKey]],
        changed: Callable[[Sequence[ApiKey]], None],
        log: Log,
    ) -> None:
        """`read` raises ConfigError. `changed` is called on the event loop with the new keys."""
        self._path = path
        self._read = read
        self._changed = changed
        self._log = log
        self._asked = asyncio.Event()
        self._seen = self._stamp()
        self._failure = ""  # why the last read failed

    def ask(self) -> None:
        """Reload the file now, whether or not it has changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Run for ever: check the file once per CHECK_SECONDS and whenever `ask` is called.

        After a failed read the file is read again until that succeeds, even if it has not changed: a lack of file
        descriptors or threads must not keep a revoked key valid. A repeated failure is logged once.
        """
        while True:
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._asked.wait()
            except TimeoutError:
                pass
            stamp = self._stamp()
            asked = self._asked.is_set()
            if stamp == self._seen and not asked and not self._failure:
                continue
            if asked:
                self._failure = ""
            self._asked.clear()
            self._seen = stamp
            await self._reload()

    async def _reload(self) -> None:
        try:
            # off the event loop: parsing a large file takes time
            keys = await asyncio.to_thread(self._read, self._path)
        except (ConfigError, RuntimeError) as error:
            # RuntimeError: no thread can be started for it.
            reason, before = str(error), self._failure
            self._failure = reason
            if reason != before:
                self._log.error("cannot reload the API keys; the previous keys stay valid", reason=reason)
            return
        self._failure = ""
        self._changed(keys)
        self._log.info("reloaded the API keys", keys=len(keys))

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
