"""What decode nodes say to this prefill node: handed to the sender; who keeps sending garbage is cut off."""

from __future__ import annotations

from common.ipc import RouterSocket
from kv_transfer.sender import Sender


def take_peer_frames(peers: RouterSocket, sender: Sender) -> None:
    """Handle everything that has arrived, up to the socket's bound per call."""
    handshakes = sender.counters.handshakes
    for peer, frame in peers.drain():
        malformed = sender.counters.malformed
        sender.handle(peer, frame)
        if sender.counters.malformed != malformed:
            peers.refuse(peer, "not a message for a prefill node")
    if sender.counters.handshakes != handshakes:
        # a flood of strangers does not push the sessions of welcomed decode nodes out
        peers.vouch_only_for(sender.peers.identities())
    peers.take_cut_off()  # a decode node that is not heard any more grants nothing: its requests are placed again
    peers.flush_log()
