"""The table of transports, and the schema of a cluster file with their keys.

Adding a transport: a folder in kv_transfer/transport/ with a `kind.py`, and a row here.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec

from common.config.schema import Cluster, Transfer
from common.config.transport_kind import TransportKind
from common.named import named

# name -> "module:attribute" of its TransportKind. `auto` takes the first one that moves pages between the nodes.
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
    """All of them, in the order of the table."""
    return [transport_kind(name) for name in TRANSPORTS]


def cluster_schema() -> type[Cluster]:
    """`Cluster` with the keys of all transports in its section `transfer`."""
    return _schema(tuple(TRANSPORTS))


@functools.cache
def _schema(names: tuple[str, ...]) -> type[Cluster]:
    choice = ("transport", Literal["auto", *names], "auto")
    transfer = _extended(Transfer, [choice, *_option_fields()])
    return _extended(Cluster, [("transfer", transfer, transfer())])


def _option_fields() -> list[tuple[str, Any, Any]]:
    """(name, type, default) of the transports' own keys; one that several have is one key."""
    fields: dict[str, tuple[str, Any, Any]] = {}
    for kind in transport_kinds():
        for field in msgspec.structs.fields(kind.options):
            made = (field.encode_name, field.type, field.default)
            if fields.setdefault(field.name, made) != made:
                raise TypeError(f"transports declare transfer.{field.name} in different ways")
    return list(fields.values())


def _extended(base: type[Any], fields: list[tuple[str, Any, Any]]) -> type[Any]:
    """`base` with further fields, or with other types of those that it has."""
    return msgspec.defstruct(
        base.__name__,
        fields,
        bases=(base,),
        module=base.__module__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )
