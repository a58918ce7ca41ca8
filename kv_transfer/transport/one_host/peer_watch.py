"""Tracks which sending processes are alive, for transports that cannot revoke a sender's access to mapped memory."""

from __future__ import annotations

from common.errors import HandshakeRefused
from common.exhaustion import EXHAUSTED, shortage
from kv_transfer.transport.one_host.process import ProcessIdentity, ProcessWatch


class PeerWatches:
    """One pidfd per incarnation of a sender."""

    def __init__(self) -> None:
        self._watches: dict[str, ProcessWatch] = {}

    def admit(self, incarnation: str, process: ProcessIdentity) -> None:
        """Watch this process. Raises HandshakeRefused if it cannot be watched."""
        if incarnation in self._watches:
            return
        try:
            self._watches[incarnation] = ProcessWatch(process)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise HandshakeRefused(f"this decode node {shortage(error)}") from None
            raise HandshakeRefused(
                f"process {process.pid} of the prefill node cannot be watched ({error.strerror}), so pages "
                "that it may write could never be reused safely; use the tcp transport on both"
            ) from None

    def dead(self, incarnation: str) -> bool:
        """Return True only when that process has ended; False for one that was never admitted."""
        watch = self._watches.get(incarnation)
        return watch is not None and watch.dead

    def forget(self, incarnation: str) -> None:
        watch = self._watches.pop(incarnation, None)
        if watch is not None:
            watch.close()

    def close(self) -> None:
        for incarnation in list(self._watches):
            self.forget(incarnation)
