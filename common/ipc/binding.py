"""Binds ZMQ sockets to addresses of this host."""

from __future__ import annotations

import errno
from typing import Any

import zmq

from common.ipc.curve import is_ipv6
from common.ipc.host_lookup import listening_address


def bind(socket: zmq.Socket[Any], address: str) -> None:
    """Bind a socket to an address of this host, or to that of its name. Raises zmq.ZMQError."""
    own = listening_address(address)
    socket.setsockopt(zmq.IPV6, is_ipv6(own))
    socket.bind(own)


def bind_problem(error: zmq.ZMQError | OSError) -> str:
    """Say why a socket could not be bound."""
    if error.errno == errno.ENODEV:
        # libzmq takes a name that is not found for that of a network interface.
        return "neither a host nor a network interface of this name is found"
    return error.strerror or str(error)
