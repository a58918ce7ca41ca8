"""Opens the socket at which a decode node listens for prefill nodes."""

from __future__ import annotations

import socket

from common.errors import ConfigError
from common.ipc.host_lookup import listening_host

BACKLOG = 128


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that does not block and listens at an address of this host, or at that of its name.

    `port`: 0 for any. Raises ConfigError.
    """
    try:
        own = listening_host(host)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        listener = socket.create_server((own, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            "decode.nodes",
            f"cannot listen for pages at {host}, port {port or 'any'}: {reason}; give the node an address of its host "
            "as `host`, and a free port or none as `bulk_port`",
        ) from error
    listener.setblocking(False)
    return listener
