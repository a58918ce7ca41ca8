"""The decode node's side of transports whose senders have mapped its memory and therefore cannot be fenced."""

from __future__ import annotations

from kv_transfer.transport.base import ReceiverEndpoint, Window
from kv_transfer.transport.one_host.peer_watch import PeerWatches
from kv_transfer.transport.one_host.process import ProcessIdentity


class OneHostReceiver(ReceiverEndpoint):
    """Watches the processes of its peers: pages are safe once a peer confirms it or has ended."""

    def __init__(self) -> None:
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
