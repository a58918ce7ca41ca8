"""Checks the names of nodes in a cluster file, patterns of names included, and resolves addresses on this host."""

from __future__ import annotations

import ipaddress

from common.config.schema import Cluster
from common.errors import ConfigError
from common.messages.identity import ROUTER_NAME
from common.node_names import ANY, OWN, is_pattern, overlap
from common.tcp_address import tcp_address

ADDRESS_KEY = "process.address"


def check_names(cluster: Cluster) -> None:
    """Raise ConfigError unless every name that a node can have belongs to one entry."""
    names: dict[str, str] = {}
    for role, nodes in (("prefill", cluster.prefill.nodes), ("decode", cluster.decode.nodes)):
        for index, node in enumerate(nodes):
            path = f"{role}.nodes[{index}]"
            if node.name in names and not (role == "decode" and _is_movable(cluster, node.name)):
                raise ConfigError(
                    f"{path}.name",
                    f"{node.name!r} is also {names[node.name]}; every node has its own name, and one that is to have "
                    "both roles in turn is named in movable.nodes, too",
                )
            if node.name == ROUTER_NAME:
                raise ConfigError(f"{path}.name", "'router' is the router's name; choose another")
            if is_pattern(node.name):
                _check_pattern(node.name, node.count, path, names)
            elif node.count is not None:
                raise ConfigError(
                    f"{path}.count",
                    f"{node.name} is one node; leave count out, or end the name with {ANY} to let several join",
                )
            names[node.name] = f"{path}.name"


def _is_movable(cluster: Cluster, name: str) -> bool:
    """Return whether a name may be in the lists of both roles."""
    listed = [node.name for node in cluster.prefill.nodes].count(name) == 1
    again = [node.name for node in cluster.decode.nodes].count(name) == 1
    return cluster.movable.role_of(name) is not None and listed and again


def _check_pattern(name: str, count: int | None, path: str, names: dict[str, str]) -> None:
    if count is None:
        raise ConfigError(
            f"{path}.count",
            f"nodes join as {name} by themselves: say how many there may be at the same time, as in count: 16",
        )
    other = next((each for each in names if is_pattern(each) and overlap(each, name)), None)
    if other is not None:
        raise ConfigError(
            f"{path}.name",
            f"{name!r} and {other!r} ({names[other]}) match the same names; choose other prefixes",
        )
    if overlap(name, ROUTER_NAME + ANY):
        raise ConfigError(f"{path}.name", f"{name!r} looks like a router; choose another prefix")


def check_own_address(cluster: Cluster) -> None:
    """Raise ConfigError unless `process.address` is an IP address that other hosts can use."""
    if cluster.process.address is None:
        return
    try:
        address = ipaddress.ip_address(cluster.process.address)
    except ValueError:
        raise ConfigError(
            ADDRESS_KEY, f"{cluster.process.address!r} is not an IP address; write one, as in 10.0.0.7"
        ) from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(ADDRESS_KEY, f"no host has the address {address}; write that of this host")


def uses_own_address(cluster: Cluster) -> bool:
    """Return whether some node's address is on `own`."""
    hosts = [cluster.kv_events.host, *(node.host for node in cluster.decode.nodes)]
    return OWN in hosts or any(_host_of(node.peer_address) == OWN for node in cluster.prefill.nodes)


def own_host(cluster: Cluster, host: str, path: str) -> str:
    """Return a host with `own` replaced. Raises ConfigError if the file does not say what this address is."""
    if host != OWN:
        return host
    if cluster.process.address is None:
        raise ConfigError(
            path,
            f"{OWN} stands for {ADDRESS_KEY}, which is not set; set it, on Kubernetes by TANDEM_PROCESS_ADDRESS from "
            "status.podIP",
        )
    return cluster.process.address


def own_peer_address(cluster: Cluster, address: str, path: str) -> str:
    """Return a ZMQ address with the host `own` replaced. Raises ConfigError."""
    if _host_of(address) != OWN:
        return address
    return tcp_address(own_host(cluster, OWN, path), address.rpartition(":")[2])


def _host_of(address: str) -> str:
    """Return the host of a tcp:// address; "" for another one."""
    return address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else ""
