"""Resolves the section kv_events for one node, and checks that its sockets are open to nobody by accident."""

from __future__ import annotations

from common.config.http_exposure import is_loopback
from common.config.node_entries import own_peer_address
from common.config.schema import Cluster, PlacementSection
from common.config.transport_choice import nodes_of
from common.errors import ConfigError
from common.kv_events.plan import KvEventsPlan
from common.messages.identity import ROLES
from common.node_names import NodeNames

HOST = "kv_events.host"


def check_kv_events(cluster: Cluster) -> None:
    """Raise ConfigError with the remedy if events are open to others, or ports collide."""
    section = cluster.kv_events
    if not section.enabled:
        _refuse_readers(cluster.router.placement)
        return
    if not is_loopback(section.host) and not cluster.security.isolated_network:
        raise ConfigError(
            HOST,
            f"{section.host} can be reached from other hosts, and KV events are neither encrypted nor authenticated: "
            "write 127.0.0.1, or security.isolated_network: true if that network has no other users",
        )
    count = len(nodes_of(cluster))
    for key, port in (("first_port", section.first_port), ("first_replay_port", section.first_replay_port)):
        if port + count - 1 > 65_535:
            raise ConfigError(
                f"kv_events.{key}", f"{count} nodes from {port} on exceed 65535; choose a lower one"
            )
    if abs(section.first_port - section.first_replay_port) < count:
        raise ConfigError(
            "kv_events.first_replay_port",
            f"{section.first_replay_port} is less than {count} (the number of nodes) away from kv_events.first_port, "
            f"{section.first_port}: nodes would share ports; choose another",
        )


def _refuse_readers(placement: PlacementSection) -> None:
    for role in ROLES:
        if getattr(placement, role) == "cache_events":
            raise ConfigError(
                f"router.placement.{role}",
                "cache_events follows the KV events of nodes, and kv_events.enabled is false: set it to true, or write "
                "cache_aware",
            )


def event_addresses(cluster: Cluster, role: str, entry: str) -> tuple[str, str]:
    """Return the addresses of events and of their replay of an entry's nodes. The host may be `own`."""
    section = cluster.kv_events
    prefill, decode = (
        [node.name for node in nodes] for nodes in (cluster.prefill.nodes, cluster.decode.nodes)
    )
    before, names = (0, prefill) if role == "prefill" else (len(prefill), decode)
    number = before + names.index(entry)
    host = f"[{section.host}]" if ":" in section.host and not section.host.startswith("[") else section.host
    return (
        f"tcp://{host}:{section.first_port + number}",
        f"tcp://{host}:{section.first_replay_port + number}",
    )


def kv_events_plan(cluster: Cluster, role: str, name: str, model: str) -> KvEventsPlan | None:
    """Return how the node `name` publishes; None if it does not. `model` is the served name. Raises ConfigError.

    Each half of a movable node publishes for itself.
    """
    section = cluster.kv_events
    if not section.enabled:
        return None
    nodes = cluster.prefill.nodes if role == "prefill" else cluster.decode.nodes
    entry = NodeNames.of(node.name for node in nodes).entry(name)
    assert entry is not None, "the caller has found the node's entry"
    address, replay_address = (
        own_peer_address(cluster, each, HOST) for each in event_addresses(cluster, role, entry)
    )
    publisher = name if cluster.movable.role_of(name) is None else f"{name}.{role}"
    return KvEventsPlan(
        address=address,
        replay_address=replay_address,
        topic=f"kv@{publisher}@{model}",
        block_tokens=cluster.router.placement.block_tokens,
        token_ids=section.token_ids,
        replay_batches=section.replay_batches,
        max_queue=section.max_queue,
    )
