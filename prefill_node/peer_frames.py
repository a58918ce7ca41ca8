"""Receives the messages of decode nodes for the sender, and disconnects peers that keep sending invalid frames."""

from __future__ import annotations

from common.ipc import RouterSocket
from kv_transfer.sending import PageSender


def take_peer_frames(peers: RouterSocket, sender: PageSender) -> None:
    """Handle all messages that have arrived, up to the socket's limit per call."""
    handshakes = sender.counters.handshakes
    for peer, frame in peers.drain():
        malformed = sender.counters.malformed
        sender.handle(peer, frame)
        if sender.counters.malformed != malformed:
            peers.refuse(peer, "not a message for a prefill node")
    if sender.counters.handshakes != handshakes:
        # A flood of unknown peers must not evict the sessions of accepted decode nodes.
        peers.vouch_only_for(sender.peers.identities())
    peers.take_cut_off()  # a disconnected decode node grants nothing, so its requests are placed again
    peers.flush_log()
