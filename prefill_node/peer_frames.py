"""What decode nodes say to this prefill node: handed to the sender; who keeps sending garbage is cut off."""

from __future__ import annotations

from common.ipc import RouterSocket
from kv_transfer.sender import Sender


def take_peer_frames(peers: RouterSocket, sender: Sender) -> None:
    """Everything that has arrived, up to the socket's bound per call."""
    for peer, frame in peers.drain():
        malformed = sender.counters.malformed
        sender.handle(peer, frame)
        if sender.counters.malformed != malformed:
            peers.refuse(peer, "not a message for a prefill node")
    peers.take_cut_off()  # a decode node that is not heard any more grants nothing: its requests are placed again
    peers.flush_log()
