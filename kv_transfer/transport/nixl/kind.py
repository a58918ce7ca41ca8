"""The record of `nixl`: any hosts, pools on CPUs or on GPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.config.schema import Positive
from common.config.transport_kind import Topology, TransportKind, TransportOptions
from common.errors import ConfigError
from kv_transfer.transport.description import Address, Description
from kv_transfer.transport.tcp.kind import TcpDescription

NetDevices = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:@,-]{1,1024}\Z")]
MAX_METADATA_BYTES = 256 << 10  # a NIXL agent's: addresses of its network devices and keys of two regions


class NixlDescription(Description, frozen=True, tag="nixl"):
    """Memory registered with a NIXL agent that bears the node's incarnation; addresses mean something to it alone."""

    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
    kv: Address
    device: Annotated[int, msgspec.Meta(ge=-1, le=1023)]  # CUDA ordinal of the pool; -1: host memory
    records: Address
    lifeline: TcpDescription


class NixlOptions(TransportOptions, frozen=True, kw_only=True):
    """Keys of `transfer` that nixl reads."""

    nixl_devices: NetDevices = "lo"  # what UCX_NET_DEVICES takes, as mlx5_0:1,mlx5_1:1 or eth0
    max_inflight_mib: Positive = 64  # of one transfer


def _refusal(topology: Topology) -> str:
    """It joins any nodes of one kind of device."""
    return ""


def _allow(topology: Topology, options: NixlOptions) -> None:
    """UCX listens, and knows no keys: whoever reaches it can write into a node's memory."""
    if not topology.isolated_network:
        raise ConfigError(
            "security.isolated_network",
            f"pages move by nixl here, and whoever reaches its devices ({options.nixl_devices}) can write into the "
            "nodes' memory, since UCX authenticates nobody and encrypts nothing: say true if only these nodes reach "
            "them (for lo: if no other user is on this host), or take another transport",
        )
    if options.nixl_devices == "lo" and not topology.one_host:
        raise ConfigError(
            "transfer.nixl_devices",
            "lo reaches no other host: name the network devices that nixl may use, as mlx5_0:1,mlx5_1:1 or eth0",
        )


KIND = TransportKind(
    name="nixl",
    refusal=_refusal,
    options=NixlOptions,
    sender="kv_transfer.transport.nixl.sender:make_sender",
    receiver="kv_transfer.transport.nixl.receiver:make_receiver",
    listens=True,
    allow=_allow,
)
