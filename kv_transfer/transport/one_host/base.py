"""The decode node's side of transports whose senders have mapped its memory and therefore cannot be fenced."""

from __future__ import annotations

from abc import abstractmethod

from kv_transfer.transport.base import ReceiverEndpoint, Region, Window
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host.peer_watch import PeerWatches
from kv_transfer.transport.one_host.process import ProcessIdentity


class OneHostReceiver(ReceiverEndpoint):
    """Watches the processes of its peers: pages are safe once a peer confirms it or has ended."""

    def __init__(self) -> None:
        """Raise ConfigError if processes of this host cannot be told apart."""
        process.check_proc()
        self._watches = PeerWatches()

    def admit(self, incarnation: str, process: ProcessIdentity) -> None:
        self._watches.admit(incarnation, process)

    def announce(self, window: Window) -> None:
        """No-op: the sender has mapped the whole pool."""

    def revoke(self, generation: int) -> bool:
        return False

    def peer_is_dead(self, incarnation: str) -> bool:
        return self._watches.dead(incarnation)

    def forget(self, incarnation: str) -> None:
        self._watches.forget(incarnation)

    def close(self) -> None:
        self._watches.close()


class MappedReceiver(OneHostReceiver):
    """A receiver whose pool and records are host memory that senders map by its name."""

    kv: memoryview

    @abstractmethod
    def create(self, region: Region, nbytes: int) -> memoryview:
        """Make the zeroed memory of a region, which other processes can map."""

    def allocate(self, region: Region, nbytes: int) -> memoryview:
        view = self.create(region, nbytes)
        if region is Region.KV:
            self.kv = view
        else:
            self.records = view
        return view
