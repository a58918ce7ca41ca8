"""The record of the `tcp` transport: any hosts, pools on CPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.config.section import Positive
from common.config.transport_kind import Topology, TransportKind, TransportOptions
from kv_transfer.transport.description import Description, Name


class TcpDescription(Description, frozen=True, tag="tcp"):
    """Describes a listening socket. The key is for one peer and authenticates it, by HMAC over a nonce."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class TcpOptions(TransportOptions, frozen=True, kw_only=True):
    """Keys of `transfer` that tcp reads."""

    max_inflight_mib: Positive = 64  # in flight per connection


def _refusal(topology: Topology) -> str:
    return "tcp moves pages in host memory, and these nodes are on GPUs" if topology.gpu else ""


KIND = TransportKind(
    name="tcp",
    refusal=_refusal,
    options=TcpOptions,
    sender="kv_transfer.transport.tcp.sender:make_sender",
    receiver="kv_transfer.transport.tcp.receiver:make_receiver",
    listens=True,
)
