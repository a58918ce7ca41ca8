"""Says which nodes of a cluster file are certainly on different hosts, by the addresses that it gives them."""

from __future__ import annotations

import ipaddress

from common.config.schema import Cluster, DecodeNodeEntry, NodeEntry, PrefillNodeEntry
from common.node_names import OWN
from common.tcp_address import tcp_host

UNKNOWN = ""


def elsewhere(cluster: Cluster, node: NodeEntry, other: NodeEntry) -> bool:
    """Return whether `other` is certainly on another host than `node`, which is the caller's own node."""
    host = _host(node)
    if host == OWN:
        host = cluster.process.address or UNKNOWN
    return _differ(host, _host(other))


def _host(node: NodeEntry) -> str:
    """Return the host in a node's address, UNKNOWN without one."""
    if isinstance(node, DecodeNodeEntry):
        return node.host
    return tcp_host(node.peer_address) if isinstance(node, PrefillNodeEntry) else UNKNOWN


def _differ(one: str, other: str) -> bool:
    """Return whether these are two hosts: two addresses of one kind, or two names that begin differently.

    A name against an address, or an IPv4 against an IPv6 address, may be one host.
    """
    first, second = _kind(one), _kind(other)
    return first is not None and second is not None and first[0] == second[0] and first[1] != second[1]


def _kind(host: str) -> tuple[str, str] | None:
    """Return a kind of name and the host in it; None if `host` does not tell the host."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        label = host.lower().partition(".")[0]
        return None if label in (UNKNOWN, OWN, "*", "localhost") else ("name", label)
    if address.is_loopback or address.is_unspecified:
        return None
    return f"IPv{address.version}", str(address)
