"""ZMQ sockets as typed, bounded, non-blocking channels. No torch, no threads of its own."""

from common.ipc.channel import Dealer, RouterSocket, check_bind

__all__ = ["Dealer", "RouterSocket", "check_bind"]
