"""Which transport a cluster's pages take, and whether its nodes can use it."""

from __future__ import annotations

from typing import Literal

from common.config.schema import Cluster, DecodeNode, PrefillNode
from common.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Transport = Literal["shm", "tcp", "cuda_ipc"]


def choose_transport(cluster: Cluster) -> Transport:
    """What `transfer.transport` names; auto: on one host shm between CPUs and cuda_ipc between GPUs, else tcp.

    Raises ConfigError where nodes are on CPUs and on GPUs, and where the transport cannot reach their pages.
    """
    gpu = _on_gpu(cluster)
    named = cluster.transfer.transport
    if named == "auto":
        chosen: Transport = ("cuda_ipc" if gpu else "shm") if _one_host(cluster) else "tcp"
    else:
        chosen = named
    if gpu and chosen != "cuda_ipc":
        raise ConfigError(
            "transfer.transport",
            f"{chosen} moves pages that lie in host memory, and these nodes are on GPUs; pages of GPUs move by "
            "cuda_ipc, between nodes of one host: leave peer_address and host at their defaults",
        )
    if not gpu and chosen == "cuda_ipc":
        raise ConfigError(
            "transfer.transport",
            "cuda_ipc moves pages between GPUs, and these nodes are on the CPU; write auto, shm or tcp",
        )
    return chosen


def _on_gpu(cluster: Cluster) -> bool:
    """True if all nodes are on GPUs, False if all are on CPUs."""
    nodes: tuple[PrefillNode | DecodeNode, ...] = (*cluster.prefill.nodes, *cluster.decode.nodes)
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
