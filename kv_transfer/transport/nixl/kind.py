"""The record of the `nixl` transport: any hosts, pools on CPUs or on GPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.config.section import Positive
from common.config.transport_kind import Topology, TransportKind, TransportOptions
from common.errors import ConfigError
from kv_transfer.transport.description import Address, Description
from kv_transfer.transport.tcp.kind import TcpDescription

NetDevices = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:@,-]{1,1024}\Z")]
# The metadata of a NIXL agent holds the addresses of its network devices and the keys of two regions.
MAX_METADATA_BYTES = 256 << 10


class NixlDescription(Description, frozen=True, tag="nixl"):
    """Describes memory registered with a NIXL agent named after the node's incarnation; only that node uses
    addresses.
    """

    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
    kv: Address
    device: Annotated[int, msgspec.Meta(ge=-1, le=1023)]  # CUDA ordinal of the pool; -1: host memory
    records: Address
    liveness: TcpDescription


class NixlOptions(TransportOptions, frozen=True, kw_only=True):
    """Keys of `transfer` that nixl reads."""

    nixl_devices: NetDevices = "lo"  # the value of UCX_NET_DEVICES, such as mlx5_0:1,mlx5_1:1 or eth0
    max_inflight_mib: Positive = 64  # per NIXL transfer


def _refusal(topology: Topology) -> str:
    """Return no refusal: nixl connects any nodes of one kind of device."""
    return ""


def _allow(topology: Topology, options: NixlOptions) -> None:
    """Refuse networks that are not isolated: UCX has no keys, so any host that reaches it can write into a node."""
    if not topology.isolated_network:
        raise ConfigError(
            "security.isolated_network",
            f"pages are sent by nixl, and anyone who reaches its devices ({options.nixl_devices}) can write into the "
            "nodes' memory, since UCX neither authenticates nor encrypts: set it to true if only these nodes reach "
            "them (for lo: if this host has no other users), or choose another transport",
        )
    if options.nixl_devices == "lo" and not topology.one_host:
        raise ConfigError(
            "transfer.nixl_devices",
            "lo reaches no other host: set the network devices that nixl may use, such as mlx5_0:1,mlx5_1:1 or eth0",
        )


KIND = TransportKind(
    name="nixl",
    refusal=_refusal,
    options=NixlOptions,
    sender="kv_transfer.transport.nixl.sender:make_sender",
    receiver="kv_transfer.transport.nixl.receiver:make_receiver",
    listens=True,
    within_process=False,
    allow=_allow,
)
