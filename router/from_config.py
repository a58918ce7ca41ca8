"""Derives the router's expectations of its nodes, and each listener's authentication, from the cluster file.

It also decides how answers of the model are read.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.api_key import ApiKey
from common.checkpoint.chat_template_file import find_chat_template
from common.config import Resolved
from common.config.admin_listener import admin_listeners
from common.config.api_keys import read_api_keys
from common.config.http_exposure import is_loopback
from common.config.kv_events import event_addresses
from common.config.resolve_node import movable_section, pool_budget
from common.config.router_processes import RouterProcess, router_name
from common.config.run_directory import entry_peer_address, own_socket, use_file
from common.config.schema import Cluster, Model, NodeEntry
from common.grammar.token_marker import TokenMarker
from common.messages.generation import MAX_MARKER
from common.messages.identity import Role
from common.observability.logs import Log
from router.auth.gates import Gate, KeyGate, OpenGate
from router.auth.keys import KeyFile, KeyRing
from router.auth.ledger import SharedLedger
from router.auth.origin import Cors, HostRule
from router.auth.quotas import Quotas
from router.chat.answer_style import AnswerStyle, find_template
from router.chat.call_formats import CALL_FORMATS
from router.http.client import View
from router.nodes.registration import ExpectedNode, RegistrationRules
from router.requests.hidden_states import StateLimit
from router.server.connection_log import ConnectionLog
from router.server.connections import ConnectionLimit, affordable_connections
from router.server.listeners import HttpPlan, TcpEntry
from router.server.sockets import TlsFiles
from router.tokens.tokenizer import Tokenizer


def registration_rules(resolved: Resolved, max_model_len: int, vocab_size: int) -> RegistrationRules:
    """`max_model_len`: the limit of the configuration, or else of the model."""
    cluster = resolved.cluster
    page_size = cluster.kv.page_size

    def expected(role: Role, node: NodeEntry) -> tuple[int, int | None]:
        """Return (least context length, pages of the pool); None pages if the node sizes the pool itself."""
        section = cluster.prefill if role == "prefill" else cluster.decode
        movable = movable_section(cluster, node.name)
        tokens = pool_budget(role, section, node.rank_devices[0], movable).tokens
        if tokens is None:
            return cluster.model.max_model_len or 1, None
        pages = tokens // page_size
        return min(max_model_len, pages * page_size), pages

    def events(role: Role, entry: str) -> tuple[str, str] | None:
        return event_addresses(cluster, role, entry) if cluster.kv_events.enabled else None

    nodes: dict[str, ExpectedNode] = {}
    for prefill in cluster.prefill.nodes:
        least, pages = expected("prefill", prefill)
        address = entry_peer_address(resolved, prefill)
        nodes[prefill.name] = ExpectedNode(
            "prefill", address, least, pages, prefill.count, events=events("prefill", prefill.name)
        )
    for decode in cluster.decode.nodes:
        least, pages = expected("decode", decode)
        decoding = ExpectedNode(
            "decode", "", least, pages, decode.count, events=events("decode", decode.name)
        )
        other = nodes.get(decode.name)
        nodes[decode.name] = decoding if other is None else replace(other, decoding=decoding)
    return RegistrationRules(nodes, page_size, max_model_len, vocab_size)


def http_plan(
    resolved: Resolved, process: RouterProcess, body_bytes: int, now: Callable[[], float], log: Log
) -> HttpPlan:
    """Return where the router listens and whom it admits. Raises ConfigError for unusable keys and certificates.

    Args:
        body_bytes: the largest accepted body.
        now: returns Unix seconds.
    """
    cluster = resolved.cluster
    router, security = cluster.router, cluster.security
    places = admin_listeners(resolved)
    cors = Cors(router.cors_origins)
    gate: Gate
    admin: TcpEntry | None = None
    keys: KeyFile | None = None
    ledger: SharedLedger | None = None
    path = resolved.api_keys_path
    if path is None:
        view = View.CLUSTER if is_loopback(router.host) else View.SERVICE
        hosts = HostRule((router.host, *router.allowed_hosts), cors)
        gate = OpenGate(hosts, view, security.open_metrics)
    else:
        found = read_api_keys(path)
        if process.host_peers:
            own, *others = (use_file(resolved, index) for index in (process.index, *process.host_peers))
            ledger = SharedLedger(own, others)
        ring, quotas = KeyRing(found, now), Quotas(time.monotonic, ledger)
        # An earlier process with the same ledger may have served other keys.
        quotas.replace(found)

        def changed(keys: Sequence[ApiKey]) -> None:
            ring.replace(keys)
            quotas.replace(keys)

        keys = KeyFile(path, read_api_keys, changed, log)
        gate = KeyGate(ring, quotas, None, security.share_prefix_cache, security.open_metrics)
        if places.address is not None:
            admin_gate = KeyGate(ring, quotas, "admin", security.share_prefix_cache, open_metrics=False)
            admin = TcpEntry(places.address, "router.admin", admin_gate, Cors(()))
    tls = TlsFiles(*resolved.tls_paths) if resolved.tls_paths is not None else None
    closed = ConnectionLog(log)
    return HttpPlan(
        TcpEntry((router.host, router.port), "router.port", gate, cors, tls),
        admin,
        places.socket,
        keys,
        ConnectionLimit(router.max_connections_per_client, _connections(cluster, log), closed.note),
        body_bytes,
        process.name,
        own_socket(resolved, process.index) if process.host_peers else None,
        {router_name(index): own_socket(resolved, index) for index in process.host_peers},
        ledger,
        closed,
    )


def _connections(cluster: Cluster, log: Log) -> int:
    """Return the limit of open HTTP connections: that of the file, unless this process may open fewer files."""
    asked = cluster.router.max_connections
    nodes = sum(node.count or 1 for node in (*cluster.prefill.nodes, *cluster.decode.nodes))
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return asked
    found = affordable_connections(asked, descriptors, nodes)
    if found < asked:
        log.warning(
            "the limit of open files allows fewer HTTP connections than router.max_connections; raise it (ulimit -n)",
            connections=found,
            max_connections=asked,
            open_files=descriptors,
        )
    return found


def state_limit(section: Model, hidden_size: int) -> StateLimit | None:
    """Return the limit of hidden states; None if the cluster file does not allow them."""
    if not section.return_hidden_states:
        return None
    return StateLimit(hidden_size, section.hidden_states_mib << 20)


def answer_style(resolved: Resolved, tokenizer: Tokenizer, log: Log) -> AnswerStyle:
    """Find out how the model of a cluster file marks its answers. Raises ModelError."""
    section = resolved.cluster.model
    template, family = find_template(
        resolved.model_path, resolved.chat_template_path, section.response_template, resolved.relative
    )
    if template is None:
        log.info(
            "the formats of reasoning and tool calls of this model are not known: answers are plain text, and tools "
            "are refused; model.response_template sets them",
            model=str(resolved.model_path),
        )
    else:
        log.info(
            "answers are parsed",
            family="its own template" if family is None else family.name,
            reasoning=template.reasons,
            tool_calls=template.calls,
        )
        source = find_chat_template(resolved.model_path, resolved.chat_template_path)
        if template.calls and source is not None and "tools" not in source.all_text:
            log.warning(
                "the chat template does not show tools to the model, so it calls them only where tool_choice forces "
                "it to; set another template in model.chat_template",
                file=str(source.file),
            )
    style = AnswerStyle(
        template,
        short_ids=family is not None and family.short_ids,
        special={} if template is None else tokenizer.markers_in(template.text),
        calls=None if family is None else CALL_FORMATS.get(family.name),
        template_variables=frozenset(section.chat_template_kwargs),
        reasoning_fields=resolved.cluster.router.reasoning_fields,
    )
    return replace(style, think_markers=_think_markers(style, tokenizer))


def _think_markers(style: AnswerStyle, tokenizer: Tokenizer) -> tuple[TokenMarker, TokenMarker] | None:
    """Return what nodes recognise and force; None unless both markers are texts that tokens can write."""
    if style.think is None:
        return None
    begin, end = (tokenizer.tokens_within(text) for text in style.think)
    for tokens, text in zip((begin, end), style.think, strict=True):
        written = b"".join(map(tokenizer.token_bytes, tokens))
        if len(tokens) > MAX_MARKER or written != text.encode():
            return None
    return TokenMarker(begin, tokenizer.symbols_of), TokenMarker(end, tokenizer.symbols_of)
