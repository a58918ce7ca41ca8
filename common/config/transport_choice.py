"""Chooses the transport of a cluster's pages, and checks that its nodes can use it."""

from __future__ import annotations

from typing import Any

from common.config.schema import Cluster, DecodeNodeEntry, PrefillNodeEntry
from common.config.transport_kind import Topology, TransportKind
from common.config.transports import transport_kind, transport_kinds
from common.errors import ConfigError
from common.tcp_address import tcp_host

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def choose_transport(cluster: Cluster) -> TransportKind[Any]:
    """Return the transport that `transfer.transport` names; auto: the first one of the table that connects these
    nodes.

    The choice depends only on the file, never on what is installed: both ends read the same file and therefore agree.
    Raises ConfigError if some nodes are on CPUs and others on GPUs, if the transport cannot access their pages, or if
    the file does not allow it.
    """
    _refuse_mixed_devices(cluster)
    chosen, topology = named_transport(cluster), _topology(cluster)
    if refusal := chosen.refusal(_as_named(topology)):
        others = [kind.name for kind in transport_kinds() if not kind.refusal(_as_named(topology))]
        raise ConfigError("transfer.transport", f"{refusal}; write auto{_or(others)}")
    chosen.allow(topology, chosen.read(cluster.transfer))
    return chosen


def named_transport(cluster: Cluster) -> TransportKind[Any]:
    """Return the transport of `choose_transport` without checking that these nodes can use it."""
    named = cluster.transfer.transport
    if named != "auto":
        return transport_kind(named)
    return next(kind for kind in transport_kinds() if not kind.refusal(_topology(cluster)))


def nodes_of(cluster: Cluster) -> tuple[PrefillNodeEntry | DecodeNodeEntry, ...]:
    return *cluster.prefill.nodes, *cluster.decode.nodes


def choose_layers(cluster: Cluster) -> bool:
    """Return whether pages are sent layer by layer during their forward.

    Raises ConfigError if the transport sends only whole pages, and in the cases of `choose_transport`.
    """
    transport, wanted = choose_transport(cluster), cluster.transfer.layers
    if wanted and not transport.layers:
        able = " and ".join(kind.name for kind in transport_kinds() if kind.layers)
        raise ConfigError(
            "transfer.layers",
            f"{transport.name} sends whole pages only; {able} send them layer by layer: write false",
        )
    return wanted


def _topology(cluster: Cluster) -> Topology:
    gpu = any(node.on_gpu for node in nodes_of(cluster))
    return Topology(gpu, _one_host(cluster), cluster.security.isolated_network)


def _as_named(topology: Topology) -> Topology:
    """Return the topology for a named transport: addresses off loopback may belong to one host.

    The handshake finds out whether a transport within one host is possible.
    """
    return Topology(topology.gpu, True, topology.isolated_network)


def _or(names: list[str]) -> str:
    return "".join(f", {name}" for name in names[:-1]) + f" or {names[-1]}" if names else ""


def _refuse_mixed_devices(cluster: Cluster) -> None:
    nodes = nodes_of(cluster)
    gpus = [node for node in nodes if node.on_gpu]
    if gpus and len(gpus) < len(nodes):
        one, other = gpus[0], next(node for node in nodes if node not in gpus)
        raise ConfigError(
            "device",
            f"{one.name} is on {one.rank_devices[0]} and {other.name} on {other.rank_devices[0]}: pages cannot be "
            "sent between a GPU and a CPU; put all prefill and decode nodes on cuda devices, or all on cpu",
        )


def _one_host(cluster: Cluster) -> bool:
    """Return whether every socket of the nodes is an ipc socket or on loopback."""
    addresses = (node.peer_address for node in cluster.prefill.nodes)
    return all(node.host in LOOPBACK for node in cluster.decode.nodes) and all(
        a == "auto" or a.startswith("ipc://") or tcp_host(a) in LOOPBACK for a in addresses
    )
