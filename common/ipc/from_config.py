"""Derives from the cluster file which security a process's links have, and who may connect to it."""

from __future__ import annotations

import zmq

from common.config import Resolved
from common.config.run_directory import run_directory
from common.config.schema import Cluster
from common.ipc.curve import Curve, LinkSecurity, PerRunCurve
from common.ipc.key_files import make_key_pairs
from common.messages.identity import ROUTER_NAME
from common.node_names import NodeNames

RUN_KEYS = "keys"  # directory in the run directory


def link_security(context: zmq.Context[zmq.Socket[bytes]], resolved: Resolved, name: str) -> LinkSecurity:
    """Return the security of the process `name`: "router" or a node of the file. Raises ConfigError."""
    admitted, names = admitted_names(resolved.cluster, name), NodeNames.of(all_names(resolved.cluster))
    configured = resolved.keys_path
    if configured is not None:
        return Curve(context, configured, name, admitted, names=names)

    def make() -> Curve:
        directory = run_directory(resolved) / RUN_KEYS
        make_key_pairs(directory, all_names(resolved.cluster))
        return Curve(context, directory, name, admitted, names=names)

    return PerRunCurve(make)


def all_names(cluster: Cluster) -> list[str]:
    """Return the names of all processes of a cluster and the patterns of names, each of which has a key pair."""
    prefill, decode = cluster.prefill.nodes, cluster.decode.nodes
    names = (ROUTER_NAME, *(node.name for node in prefill), *(node.name for node in decode))
    return list(dict.fromkeys(names))  # a movable node has one key for both roles


def admitted_names(cluster: Cluster, name: str) -> frozenset[str]:
    """Return whose keys may connect to the sockets of `name`: nodes to the router, decode nodes to prefill nodes."""
    decode = {node.name for node in cluster.decode.nodes}
    prefill = {node.name for node in cluster.prefill.nodes}
    if name == ROUTER_NAME:
        return frozenset(prefill | decode)
    return frozenset(decode if NodeNames.of([*prefill, *decode]).entry(name) in prefill else ())
