"""Which transport a cluster's pages take and how, and whether its nodes can use it."""

from __future__ import annotations

from typing import Literal

from common.config.schema import Cluster, DecodeNode, PrefillNode
from common.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Transport = Literal["shm", "tcp", "cuda_ipc", "nixl"]


def choose_transport(cluster: Cluster) -> Transport:
    """What `transfer.transport` names; auto: shm or cuda_ipc on one host, tcp or nixl between hosts (CPUs or GPUs).

    By the file alone, never by what is installed: both ends read the same file, and so agree. Raises ConfigError
    where nodes are on CPUs and on GPUs, where the transport cannot reach their pages, and where it is not allowed.
    """
    gpu, chosen = _on_gpu(cluster), named_transport(cluster)
    if gpu and chosen not in ("cuda_ipc", "nixl"):
        raise ConfigError(
            "transfer.transport",
            f"{chosen} moves pages that lie in host memory, and these nodes are on GPUs; pages of GPUs move by "
            "cuda_ipc between nodes of one host, and by nixl between hosts; write auto",
        )
    if not gpu and chosen == "cuda_ipc":
        raise ConfigError(
            "transfer.transport",
            "cuda_ipc moves pages between GPUs, and these nodes are on the CPU; write auto, shm, tcp or nixl",
        )
    if chosen == "nixl":
        _allow_nixl(cluster)
    return chosen


def named_transport(cluster: Cluster) -> Transport:
    """As `choose_transport`, whether or not these nodes can use it."""
    named = cluster.transfer.transport
    if named != "auto":
        return named
    gpu = any(node.device.startswith("cuda") for node in nodes_of(cluster))
    if _one_host(cluster):
        return "cuda_ipc" if gpu else "shm"
    return "nixl" if gpu else "tcp"


def nodes_of(cluster: Cluster) -> tuple[PrefillNode | DecodeNode, ...]:
    return *cluster.prefill.nodes, *cluster.decode.nodes


def choose_layers(cluster: Cluster) -> bool:
    """Whether pages leave layer by layer during their forward.

    Raises ConfigError where the transport takes whole pages alone, and as `choose_transport` does.
    """
    transport, wanted = choose_transport(cluster), cluster.transfer.layers
    if wanted and transport not in ("cuda_ipc", "shm"):
        raise ConfigError(
            "transfer.layers",
            f"{transport} takes whole pages; cuda_ipc and shm take them layer by layer: write false",
        )
    return wanted


def _allow_nixl(cluster: Cluster) -> None:
    """UCX listens, and knows no keys: whoever reaches it can write into a node's memory."""
    devices = cluster.transfer.nixl_devices
    if not cluster.security.isolated_network:
        raise ConfigError(
            "security.isolated_network",
            f"pages move by nixl here, and whoever reaches its devices ({devices}) can write into the nodes' memory, "
            "since UCX authenticates nobody and encrypts nothing: say true if only these nodes reach them "
            "(for lo: if no other user is on this host), or take another transport",
        )
    if devices == "lo" and not _one_host(cluster):
        raise ConfigError(
            "transfer.nixl_devices",
            "lo reaches no other host: name the network devices that nixl may use, as mlx5_0:1,mlx5_1:1 or eth0",
        )


def _on_gpu(cluster: Cluster) -> bool:
    """True if all nodes are on GPUs, False if all are on CPUs."""
    nodes = nodes_of(cluster)
    gpus = [node for node in nodes if node.device.startswith("cuda")]
    if gpus and len(gpus) < len(nodes):
        other = next(node for node in nodes if node not in gpus)
        raise ConfigError(
            "device",
            f"{gpus[0].name} is on {gpus[0].device} and {other.name} on {other.device}: pages do not move "
            "between a GPU and a CPU; put all prefill and decode nodes on cuda devices, or all on cpu",
        )
    return bool(gpus)


def _one_host(cluster: Cluster) -> bool:
    """Every socket of the nodes is an ipc socket or on loopback."""
    addresses = (node.peer_address for node in cluster.prefill.nodes)
    return all(node.host in LOOPBACK for node in cluster.decode.nodes) and all(
        a == "auto" or a.startswith("ipc://") or _host(a) in LOOPBACK for a in addresses
    )


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
