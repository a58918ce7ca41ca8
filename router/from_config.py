"""Derives from the cluster file what the router expects of its nodes and how each listener authenticates clients.

Also how answers of the model are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from aiohttp import web

from common.api_key import ApiKey
from common.config import Resolved
from common.config.admin_listener import admin_listeners
from common.config.api_keys import read_api_keys
from common.config.http_exposure import is_loopback
from common.config.run_directory import peer_address
from common.config.schema import DecodeSection, Model, PrefillSection
from common.observability.logs import Log
from router.auth import Entrance, Gate, KeyGate, OpenGate, OwnerGate
from router.auth_keys import KeyFile, KeyRing
from router.auth_limits import Quotas
from router.auth_origin import Cors, HostRule
from router.chat.answer_style import AnswerStyle, find_template
from router.chat.call_formats import CALL_FORMATS
from router.client import View
from router.connections import ConnectionLimit
from router.hidden_states import StateLimit
from router.http_errors import error_middleware
from router.http_listeners import HttpListeners
from router.http_server import http_runner
from router.listeners import TlsFiles
from router.registration import ExpectedNode, RegistrationRules
from router.tokenizer import Tokenizer

_AddRoutes = Callable[[web.Application], None]


def registration_rules(resolved: Resolved, max_model_len: int, vocab_size: int) -> RegistrationRules:
    """`max_model_len`: the limit of the configuration, or else of the model."""
    cluster = resolved.cluster
    page_size = cluster.kv.page_size

    def expected(section: PrefillSection | DecodeSection, device: str) -> tuple[int, int | None]:
        """Return (least context length, pages of the pool); None pages if the node sizes the pool itself."""
        tokens: int | None = None
        if section.pool_tokens != "auto":
            tokens = section.pool_tokens
        elif device == "cpu":
            tokens = section.CPU_POOL_TOKENS
        if tokens is None:
            return cluster.model.max_model_len or 1, None
        pages = tokens // page_size
        return min(max_model_len, pages * page_size), pages

    nodes: dict[str, ExpectedNode] = {}
    for prefill in cluster.prefill.nodes:
        least, pages = expected(cluster.prefill, prefill.device)
        address = peer_address(resolved, prefill.name)
        nodes[prefill.name] = ExpectedNode("prefill", address, least, pages)
    for decode in cluster.decode.nodes:
        least, pages = expected(cluster.decode, decode.device)
        nodes[decode.name] = ExpectedNode("decode", "", least, pages)
    return RegistrationRules(nodes, page_size, max_model_len, vocab_size)


def http_listeners(
    resolved: Resolved,
    body_bytes: int,
    add_routes: _AddRoutes,
    add_admin_routes: _AddRoutes,
    now: Callable[[], float],
    log: Log,
) -> HttpListeners:
    """`now` returns Unix seconds. Raises ConfigError for unusable keys and certificates."""
    cluster = resolved.cluster
    router, security = cluster.router, cluster.security
    places = admin_listeners(resolved)
    cors = Cors(router.cors_origins)

    def listener(
        gate: Gate, rules: Cors, connections: ConnectionLimit | None, *routes: _AddRoutes
    ) -> web.AppRunner:
        entrance = Entrance(gate, rules, log, time.monotonic)
        app = web.Application(
            client_max_size=body_bytes, middlewares=[error_middleware(log), entrance.middleware]
        )
        app.on_response_prepare.append(entrance.add_headers)
        for add in routes:
            add(app)
        return http_runner(app, connections)

    gate: Gate
    admin: web.AppRunner | None = None
    keys: KeyFile | None = None
    limit = ConnectionLimit(router.max_connections_per_client, router.max_connections)
    path = resolved.api_keys_path
    if path is None:
        view = View.CLUSTER if is_loopback(router.host) else View.SERVICE
        hosts = HostRule((router.host, *router.allowed_hosts), cors)
        gate = OpenGate(hosts, view, security.open_metrics)
    else:
        found = read_api_keys(path)
        ring, quotas = KeyRing(found, now), Quotas(time.monotonic)

        def changed(keys: Sequence[ApiKey]) -> None:
            ring.replace(keys)
            quotas.replace(keys)

        keys = KeyFile(path, read_api_keys, changed, log)
        gate = KeyGate(ring, quotas, None, security.share_prefix_cache, security.open_metrics)
        if places.address is not None:
            admin_gate = KeyGate(ring, quotas, "admin", security.share_prefix_cache, open_metrics=False)
            admin = listener(admin_gate, Cors(()), limit, add_routes, add_admin_routes)
    tls = TlsFiles(*resolved.tls_paths) if resolved.tls_paths is not None else None
    return HttpListeners(
        log,
        listener(gate, cors, limit, add_routes),
        (router.host, router.port),
        listener(OwnerGate(), Cors(()), None, add_routes, add_admin_routes),
        admin,
        places.address,
        places.socket,
        tls,
        keys,
        limit,
    )


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
    return AnswerStyle(
        template,
        short_ids=family is not None and family.short_ids,
        special={} if template is None else tokenizer.markers_in(template.text),
        calls=None if family is None else CALL_FORMATS.get(family.name),
        template_variables=frozenset(section.chat_template_kwargs),
        reasoning_fields=resolved.cluster.router.reasoning_fields,
    )
