"""Refuses values that have no effect in combination with the others, since their author expects an effect.

Values that equal their default are allowed. So are limits that are never reached, as `router.found_routers` on a router
that overrides its address; placement among one node; `decode.read_results: one_behind` on GPUs (which always do that);
and statements and keys without an effect of their own: `security.isolated_network` and `security.keys`. Values that
contradict others are refused by load.py and transport_choice.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from common.config.http_exposure import is_loopback
from common.config.node_entries import uses_own_address
from common.config.schema import (
    Cluster,
    DecodeNodeEntry,
    DecodeSection,
    PrefillSection,
)
from common.config.section import Section, fields_of
from common.config.transport_choice import LOOPBACK, named_transport, nodes_of
from common.config.transports import transport_kinds
from common.errors import ConfigError
from common.node_names import OWN
from common.speculation.table import algorithm

_FRACTIONS = ("prefill_memory_fraction", "decode_memory_fraction")


@dataclass(frozen=True, slots=True)
class Unread:
    """Keys of a section that have no effect in this cluster."""

    path: str  # path of the section
    section: Section
    keys: tuple[str, ...]
    reason: str  # why, and what to write instead

    def changed(self) -> Iterator[tuple[str, object]]:
        """Yield (path, value) of the keys that differ from their defaults."""
        for field in fields_of(type(self.section)):
            value = getattr(self.section, field.name)
            if field.name in self.keys and value != field.default:
                yield f"{self.path}.{field.name}", value


def refuse_unread(unread: Iterable[Unread], origins: Mapping[str, str]) -> None:
    """Raise ConfigError for the first key that differs from its default. `origins` are those of Resolved."""
    for each in unread:
        for path, value in each.changed():
            shown = list(value) if isinstance(value, tuple) else value
            origin = f" (from {origins[path]})" if path in origins else ""
            raise ConfigError(path, f"{shown} would have no effect: {each.reason}{origin}")


def unread_keys(cluster: Cluster) -> Iterator[Unread]:
    """Yield the keys that have no effect according to the cluster file."""
    yield from _of_model(cluster)
    yield from _of_speculation(cluster)
    yield from _of_images(cluster)
    yield from _of_clients(cluster)
    yield from _of_movable(cluster)
    yield from _of_placement(cluster)
    yield from _of_prefixes("prefill", cluster.prefill)
    yield from _of_prefixes("decode", cluster.decode)
    yield from _of_devices(cluster)
    yield from _of_transports(cluster)
    yield from _of_events(cluster)


def _of_model(cluster: Cluster) -> Iterator[Unread]:
    if not cluster.model.return_hidden_states:
        reason = (
            "model.return_hidden_states is false, so no answer has hidden states; write true, or leave it out"
        )
        yield Unread("model", cluster.model, ("hidden_states_mib",), reason)


def _of_speculation(cluster: Cluster) -> Iterator[Unread]:
    section = cluster.speculation
    if not algorithm(section.algorithm).drafts:
        reason = "speculation.algorithm is none, which drafts nothing; name an algorithm, or leave it out"
        yield Unread("speculation", section, ("steps", "topk", "adaptive", "draft_tokens"), reason)
    if section.draft_model_path is None:
        reason = "without speculation.draft_model_path there is no draft; name it, or leave it out"
        yield Unread("speculation", section, ("draft_manifest", "draft_quantization"), reason)


def _of_images(cluster: Cluster) -> Iterator[Unread]:
    images = cluster.router.images
    if not images.fetch_hosts:
        reason = "without router.images.fetch_hosts no image is fetched; name hosts, or leave it out"
        yield Unread("router.images", images, ("fetch_timeout",), reason)


def _of_clients(cluster: Cluster) -> Iterator[Unread]:
    if cluster.security.api_keys is None:
        reason = "it applies to API keys, and security.api_keys names no file; name one, or leave it out"
        yield Unread("security", cluster.security, ("share_prefix_cache",), reason)
        if is_loopback(cluster.router.host):
            reason = "without API keys /metrics is open on a loopback address; leave it out"
            yield Unread("security", cluster.security, ("open_metrics",), reason)
    else:
        reason = "clients authenticate by API keys, so their Host header is not checked; leave it out"
        yield Unread("router", cluster.router, ("allowed_hosts",), reason)


def _of_events(cluster: Cluster) -> Iterator[Unread]:
    section = cluster.kv_events
    if not section.enabled:
        keys = tuple(key for key in section.__struct_fields__ if key != "enabled")
        reason = "kv_events.enabled is false, so nodes publish nothing; write true, or leave it out"
        yield Unread("kv_events", section, keys, reason)
    elif cluster.prefill.prefix_cache is False and cluster.decode.prefix_cache is False:
        reason = "no node has a prefix cache that events could tell of; leave out one of the three"
        yield Unread("kv_events", section, ("enabled",), reason)


def _of_movable(cluster: Cluster) -> Iterator[Unread]:
    section = cluster.movable
    pools, fractions = ("prefill_pool_tokens", "decode_pool_tokens"), _FRACTIONS
    if not section.nodes:
        reason = "movable.nodes names no node; name one, or leave it out"
        yield Unread("router", cluster.router, ("local_prefill",), reason)
        yield Unread("movable", section, (*pools, *fractions), reason)
    elif not any(node.on_gpu for node in nodes_of(cluster)):
        reason = (
            "it applies to GPUs, and these nodes are on the CPU; write the key for tokens, or leave it out"
        )
        yield Unread("movable", section, fractions, reason)
    else:
        for role, given in (("prefill", cluster.prefill.pool_tokens), ("decode", cluster.decode.pool_tokens)):
            if (section.tokens_of(role), given) != ("auto", "auto"):
                reason = "the size of that pool is given as a number of tokens; leave out one of the two"
                yield Unread("movable", section, (f"{role}_memory_fraction",), reason)


def _of_placement(cluster: Cluster) -> Iterator[Unread]:
    placement, events = cluster.router.placement, cluster.kv_events
    policies = placement.prefill, placement.decode
    where = "name it at router.placement.prefill or .decode, or leave it out"
    if not {"cache_aware", "cache_events"} & {*policies}:
        keys = ("index_mib", "prefix_ttl", *(() if events.enabled else ("block_tokens",)))
        reason = f"only the policies cache_aware and cache_events read it; {where}"
        yield Unread("router.placement", placement, keys, reason)
    if set(policies) == {"round_robin"}:
        reason = "the policy round_robin ignores costs; name another one, or leave it out"
        keys = ("temperature_ms", "session_ttl", "session_ms", "max_imbalance_ms")
        yield Unread("router.placement", placement, keys, reason)


def unread_by_text_models(cluster: Cluster) -> Iterator[Unread]:
    """Yield the keys that have no effect for a model without a vision part."""
    reason = "this model takes no images; serve one that does, or leave it out"
    images = cluster.router.images
    yield Unread("router.images", images, images.__struct_fields__, reason)
    yield Unread("prefill", cluster.prefill, ("image_cache_mib",), reason)


def unread_by_models_without_state(cluster: Cluster) -> Iterator[Unread]:
    """Yield the keys that have no effect for a model whose requests have nothing but pages."""
    reason = (
        "this model keeps no state per request, which snapshots save; serve one that does, or leave it out"
    )
    yield Unread("prefill", cluster.prefill, ("state_snapshots",), reason)


def _of_prefixes(name: str, section: PrefillSection | DecodeSection) -> Iterator[Unread]:
    if not section.prefix_cache:
        reason = f"{name}.prefix_cache is false, so there are no prefixes to keep; leave out one of the two"
        yield Unread(name, section, ("host_mib", "state_snapshots"), reason)


def _of_devices(cluster: Cluster) -> Iterator[Unread]:
    yield from _of_memory("prefill", cluster.prefill)
    yield from _of_memory("decode", cluster.decode)
    if not _has_graphs(cluster):
        reason = "no node has graphs; see prefill.graphs and decode.graphs, or leave it out"
        yield Unread("process", cluster.process, ("poison_graphs",), reason)
    if all(node.on_gpu for node in nodes_of(cluster)):
        reason = "it applies to nodes on the CPU, and there are none; leave it out"
        yield Unread("process", cluster.process, ("threads",), reason)
    if not uses_own_address(cluster):
        reason = f"no node's address has the host {OWN}, for which it stands; leave it out"
        yield Unread("process", cluster.process, ("address",), reason)


def _has_graphs(cluster: Cluster) -> bool:
    on_gpu = any(node.on_gpu for node in nodes_of(cluster))
    backends = cluster.prefill.graphs, cluster.decode.graphs
    return cluster.prefill.enforce_graphs or any(
        each != "none" and (each != "auto" or on_gpu) for each in backends
    )


def _of_memory(name: str, section: PrefillSection | DecodeSection) -> Iterator[Unread]:
    if section.pool_tokens != "auto":
        reason = f"{name}.pool_tokens gives the size of the pool; leave out one of the two"
    elif not any(node.on_gpu for node in section.nodes):
        reason = (
            f"it applies to GPUs, and these nodes are on the CPU; write {name}.pool_tokens, or leave it out"
        )
    else:
        return
    yield Unread(name, section, ("memory_fraction",), reason)


def _of_transports(cluster: Cluster) -> Iterator[Unread]:
    transport = named_transport(cluster)
    moved = f"this cluster's transport is {transport.name}"
    own = transport.options.__struct_fields__
    others = {key for kind in transport_kinds() for key in kind.options.__struct_fields__ if key not in own}
    reason = f"{moved}; it is for another transport: leave it out, or see transfer.transport"
    yield Unread("transfer", cluster.transfer, tuple(others), reason)
    if not transport.listens:
        reason = f"{moved}, for which decode nodes bind no socket; leave it out, or see transfer.transport"
        for index, node in enumerate(cluster.decode.nodes):
            yield Unread(f"decode.nodes[{index}]", node, _of_socket(node), reason)


def _of_socket(node: DecodeNodeEntry) -> tuple[str, ...]:
    """Return the socket's keys without effect.

    A loopback host has one: `transport: auto` infers that nodes share a host.
    """
    return ("bulk_port",) if node.host in LOOPBACK else ("host", "bulk_port")
