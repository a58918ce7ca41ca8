"""The table of transports.

To add one, write a folder in kv_transfer/transport/ with a `kind.py`, and a row here.
"""

from __future__ import annotations

from typing import Any

from common.config.transport_kind import TransportKind
from common.named import named

# name -> "module:attribute" of its TransportKind. `auto` chooses the first one that can move pages between the nodes.
TRANSPORTS = {
    "shm": "kv_transfer.transport.shm.kind:KIND",
    "tcp": "kv_transfer.transport.tcp.kind:KIND",
    "cuda_ipc": "kv_transfer.transport.cuda_ipc.kind:KIND",
    "nixl": "kv_transfer.transport.nixl.kind:KIND",
}


def transport_kind(name: str) -> TransportKind[Any]:
    kind = named(TRANSPORTS[name])
    assert isinstance(kind, TransportKind)
    return kind


def transport_kinds() -> list[TransportKind[Any]]:
    """Return all kinds, in the order of the table."""
    return [transport_kind(name) for name in TRANSPORTS]
