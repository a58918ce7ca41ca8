"""ZMQ sockets as typed, bounded, non-blocking channels, and who may use them. No torch."""

from common.ipc.channel import RouterSocket, check_bind
from common.ipc.curve import LinkSecurity, Plain
from common.ipc.dealer import Dealer

__all__ = ["Dealer", "LinkSecurity", "Plain", "RouterSocket", "check_bind"]
