"""ZMQ sockets as typed, bounded, non-blocking channels. No torch, no threads of its own."""

from common.ipc.channel import Dealer, RouterSocket, check_bind
from common.ipc.curve import LinkSecurity, LoopbackOnly, link_security

__all__ = ["Dealer", "LinkSecurity", "LoopbackOnly", "RouterSocket", "check_bind", "link_security"]
