"""Which transport `transfer.transport: auto` means."""

from __future__ import annotations

from typing import Literal

from common.config.schema import Cluster

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def choose_transport(cluster: Cluster) -> Literal["shm", "tcp"]:
    """shm while every node is on this host (ipc sockets, decode hosts on loopback), else tcp."""
    if cluster.transfer.transport != "auto":
        return cluster.transfer.transport
    local_decode = all(node.host in LOOPBACK for node in cluster.decode.nodes)
    addresses = (node.peer_address for node in cluster.prefill.nodes)
    local_prefill = all(a == "auto" or a.startswith("ipc://") or _host(a) in LOOPBACK for a in addresses)
    return "shm" if local_decode and local_prefill else "tcp"


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
