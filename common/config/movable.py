"""Checks movable nodes: each needs an entry for either role, and what it may do has to be possible."""

from __future__ import annotations

from common.config.node_hosts import elsewhere
from common.config.schema import Cluster
from common.config.transport_choice import named_transport
from common.errors import ConfigError
from common.node_names import is_pattern

LOCAL = "router.local_prefill"


def check_movable(cluster: Cluster) -> None:
    """Raise ConfigError unless every movable node is one node of one rank, with an entry for either role."""
    names = set[str]()
    for index, node in enumerate(cluster.movable.nodes):
        path = f"movable.nodes[{index}].name"
        if node.name in names:
            raise ConfigError(path, f"{node.name!r} is named twice; name each movable node once")
        names.add(node.name)
        if is_pattern(node.name):
            raise ConfigError(path, f"{node.name!r} is a pattern; name every movable node itself")
        prefill = [each for each in cluster.prefill.nodes if each.name == node.name]
        decode = [each for each in cluster.decode.nodes if each.name == node.name]
        if not (prefill and decode):
            missing = "prefill.nodes" if not prefill else "decode.nodes"
            raise ConfigError(
                path, f"{node.name!r} has no entry in {missing}; a movable node has one for either role"
            )
        if elsewhere(cluster, prefill[0], decode[0]):
            raise ConfigError(
                path,
                f"{node.name} has addresses of two hosts in prefill.nodes and decode.nodes; a movable node is one "
                "process, so write addresses of its host in both",
            )
        devices = prefill[0].rank_devices, decode[0].rank_devices
        if devices[0] != devices[1]:
            raise ConfigError(
                path,
                f"{node.name} is on {', '.join(devices[0])} in prefill.nodes and on {', '.join(devices[1])} in "
                "decode.nodes; a movable node has one device for both roles",
            )
        if len(devices[0]) > 1:
            raise ConfigError(
                path, f"{node.name} has {len(devices[0])} ranks, and a movable node has one; write one device"
            )


def check_local_prefill(cluster: Cluster) -> None:
    """Raise ConfigError unless movable nodes can compute prompts for themselves, if they are to."""
    tokens, largest = cluster.router.local_prefill, cluster.prefill.chunk_tokens
    if tokens > largest:
        raise ConfigError(
            LOCAL,
            f"{tokens} tokens are more than one forward computes (prefill.chunk_tokens, {largest}); write at most that",
        )
    transport = named_transport(cluster)
    if tokens and not transport.within_process:
        raise ConfigError(
            LOCAL,
            f"transfer.transport {transport.name} does not move pages within a process; choose another one, or leave "
            "local_prefill out",
        )
