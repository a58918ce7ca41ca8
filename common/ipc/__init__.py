"""Typed, bounded, non-blocking channels over ZMQ sockets, and access control for them. No torch."""

from common.ipc.channel import RouterSocket, check_bind
from common.ipc.curve import LinkSecurity, Plain
from common.ipc.dealer import Dealer
from common.ipc.session import packs

__all__ = ["Dealer", "LinkSecurity", "Plain", "RouterSocket", "check_bind", "packs"]
