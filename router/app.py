"""Composition root of the router: config to objects, start-up and drain order."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq
from aiohttp import web

from common.config import Resolved
from common.config.run_directory import control_address, event_directory
from common.config.schema import Router
from common.config.unread import refuse_unread, unread_by_text_models
from common.errors import ConfigError, ModelError, Unavailable
from common.ipc import LinkSecurity, check_bind
from common.ipc.from_config import link_security
from common.messages.identity import new_incarnation
from common.model_config import ModelConfig, model_fingerprint
from common.model_manifest import check_manifests
from common.observability.event_log import EventLog, event_log
from common.observability.logs import Log
from common.vision_config import VisionConfig
from router.control_plane import ControlPlane
from router.dispatcher import Dispatcher, DispatchLimits
from router.fetch_process import FetchProcess
from router.from_config import registration_rules
from router.http_errors import error_middleware
from router.http_server import http_runner
from router.image_inspector import ImageInspector
from router.images import ImageLimits, ImageLoader, Images, NoImages
from router.metrics import RouterMetrics
from router.node_health import Condition, NodeHealth
from router.node_registry import Node, NodeRegistry
from router.openai_routes import OpenAiRoutes
from router.openai_schema import ChatRequest, CompletionRequest, honoured
from router.placement import POLICIES, decode_cost, prefill_cost
from router.request_checks import ServedModel
from router.return_watch import ReturnWatch
from router.status_routes import ClusterView, StatusRoutes
from router.text_pool import TextPool
from router.text_service import TextService
from router.tokenizer import Tokenizer

SHUTTING_DOWN = "this router is shutting down"
BIND_SECONDS = 5.0  # for a port that is taken: the router before this one may still be going


@dataclass(slots=True)
class RouterApp:
    """A running router. `drain` ends it: readiness off, requests finish, sockets close."""

    resolved: Resolved
    log: Log
    control: ControlPlane
    registry: NodeRegistry
    dispatcher: Dispatcher
    text_pool: TextPool
    images: Images
    runner: web.AppRunner
    context: zmq.Context[zmq.Socket[bytes]]
    security: LinkSecurity
    model: ServedModel
    incarnation: str
    events: EventLog
    draining: bool = False

    async def start(self) -> None:
        """Listen for nodes, start the text workers, then listen for clients. Raises ConfigError or ModelError."""
        router = self.resolved.cluster.router
        self.control.start(self.registry, self.dispatcher)
        await self.text_pool.start()
        await self.runner.setup()
        deadline = time.monotonic() + BIND_SECONDS
        while True:
            site = web.TCPSite(self.runner, router.host, router.port, backlog=1024, reuse_address=True)
            try:
                await site.start()
                return
            except OSError as error:
                await site.stop()
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise ConfigError(
                        "router.port",
                        f"{router.host}:{router.port} cannot be bound ({error.strerror}); choose another port",
                    ) from error
            await asyncio.sleep(0.1)

    async def drain(self) -> None:
        """Take nothing new, let requests finish up to health.drain_timeout, close."""
        self.draining = True
        self.log.info("draining", requests=self.dispatcher.active)
        deadline = time.monotonic() + self.resolved.cluster.health.drain_timeout
        while self.dispatcher.active and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.dispatcher.end_all(Unavailable(f"{SHUTTING_DOWN}, and the answer was not ready in time"))
        # gives those answers a moment to leave, cancels the rest: aborts reach the nodes before the socket closes
        await self.runner.cleanup()
        await asyncio.sleep(0.05)
        self.control.close()
        self.events.close()
        await self.images.close()
        await self.text_pool.close()
        self.security.close()
        self.context.term()

    def served(self) -> ServedModel:
        """The model with the context length that every node can serve."""
        limit = self.registry.max_model_len
        return (
            self.model
            if limit is None
            else replace(self.model, max_model_len=min(limit, self.model.max_model_len))
        )

    def admitting(self) -> ServedModel:
        """As `served`, for requests that generate. Raises Unavailable while draining."""
        if self.draining:
            raise Unavailable(f"{SHUTTING_DOWN}; try again in a few seconds")
        return self.served()

    def not_ready(self) -> str | None:
        if self.draining:
            return "draining"
        for role in ("prefill", "decode"):
            if not self.registry.count(role):
                expected = self.registry.expected(role)
                back = f"; expected back: {', '.join(expected)}" if expected else ""
                return f"no {role} node is up since {self.registry.missing_for(role):.0f} s{back}"
        return None

    def missing_nodes(self) -> list[dict[str, str]]:
        """Nodes of the cluster file that take no requests at present."""
        cluster = self.resolved.cluster
        up = {(node.role, node.name) for node in self.registry if node.state == "up"}
        configured = [("prefill", node.name) for node in cluster.prefill.nodes]
        configured += [("decode", node.name) for node in cluster.decode.nodes]
        return [{"name": name, "role": role} for role, name in configured if (role, name) not in up]

    def server_info(self) -> dict[str, Any]:
        served = self.served()
        nodes = [_describe(each) for each in self.dispatcher.health.conditions(self.registry)]
        return {
            "model_path": served.path,
            "served_model_name": served.name,
            "max_model_len": served.max_model_len,
            "ready": self.not_ready() is None,
            "missing_nodes": self.missing_nodes(),
            "incarnation": self.incarnation,
            "active_requests": self.dispatcher.active,
            "refused_messages": self.control.refused_messages,
            "parameters": {
                "/v1/chat/completions": honoured(ChatRequest),
                "/v1/completions": honoured(CompletionRequest),
            },
            "config": {
                path: {"value": value, "origin": origin} for path, value, origin in self.resolved.rows()
            },
            "nodes": nodes,
            "internal_states": [
                {
                    "node": node.name,
                    "avg_spec_accept_length": node.counters.avg_spec_accept_length,
                    "spec_accepted_at": node.counters.spec_accepted_at,
                    "phase_seconds": node.counters.phase_seconds,
                    "load": msgspec.to_builtins(node.load),
                }
                for node in self.registry
                if node.role == "decode"
            ],
        }


def build(resolved: Resolved, log: Log) -> RouterApp:
    """Compose a router. Raises ConfigError or ModelError with the remedy."""
    cluster = resolved.cluster
    address = control_address(resolved)
    path = resolved.model_path
    # the draft is the nodes' to check, and so are weights, of which the router reads headers
    check_manifests([each for each in resolved.manifests if each[0] == path], weights=False)
    config = ModelConfig.load(path)
    if config.vision is None:
        refuse_unread(unread_by_text_models(cluster), resolved.origins)
    tokenizer = Tokenizer(path)
    placeholder = -1 if config.vision is None else config.vision.image_token_id  # has no embedding of its own
    if tokenizer.vocab_size > max(config.vocab_size, placeholder + 1):
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}"
        )
    model = ServedModel(
        name=cluster.model.served_name or path.name,
        path=str(path),
        created=int(time.time()),
        vocab_size=config.vocab_size,
        max_model_len=cluster.model.max_model_len or config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        defaults=config.default_sampling,
        vision=config.vision,
    )
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved, "router")
    check_bind(address, "router.control_address", security)
    incarnation = new_incarnation()
    rules = registration_rules(resolved, model.max_model_len, config.vocab_size)
    control = ControlPlane(
        context, address, incarnation, security, log, cluster.router.max_queued_mib << 20, rules
    )

    def on_lost(node: Node, reason: str) -> None:
        dispatcher.node_lost(node, reason)
        control.announce_loss(node)

    registry = NodeRegistry(
        model_fingerprint(path),
        cluster.health.node_timeout,
        cluster.health.loop_timeout,
        time.monotonic,
        log,
        on_lost,
        lambda: dispatcher.nodes_changed(),
        ReturnWatch(
            {
                "prefill": [node.name for node in cluster.prefill.nodes],
                "decode": [node.name for node in cluster.decode.nodes],
            },
            cluster.health.return_window,
            time.monotonic,
        ),
    )
    events = event_log(
        event_directory(resolved), "router", incarnation, log, asyncio.get_running_loop().call_soon
    )
    health = NodeHealth(cluster.health.slow_start, time.monotonic)
    metrics = RouterMetrics(model.name, lambda: registry, lambda: control.refused_messages, health.conditions)
    dispatcher = Dispatcher(
        registry,
        {
            "prefill": POLICIES[cluster.router.placement.prefill](prefill_cost),
            "decode": POLICIES[cluster.router.placement.decode](decode_cost),
        },
        control.send,
        DispatchLimits(
            max_attempts=cluster.router.max_attempts,
            max_requests=cluster.router.max_requests,
            request_timeout=cluster.router.request_timeout,
            placement_wait=cluster.router.placement_wait,
            retry_ratio=cluster.router.retry_ratio,
        ),
        metrics,
        log,
        health,
        events,
    )
    images, body_bytes = _images(cluster.router, config.vision)
    app = web.Application(client_max_size=body_bytes, middlewares=[error_middleware(log)])
    runner = http_runner(app)
    text_pool = TextPool(path, body_bytes, log)
    texts = TextService(text_pool, tokenizer)
    router = RouterApp(
        resolved,
        log,
        control,
        registry,
        dispatcher,
        text_pool,
        images,
        runner,
        context,
        security,
        model,
        incarnation,
        events,
    )
    view = ClusterView(
        router.not_ready, router.missing_nodes, router.server_info, metrics.render, dispatcher.timelines.get
    )
    most = cluster.router.max_requests
    OpenAiRoutes(dispatcher, tokenizer, texts, router.admitting, images, most, log).add_to(app)
    StatusRoutes(view, router.served, texts).add_to(app)
    return router


def _images(section: Router, vision: VisionConfig | None) -> tuple[Images, int]:
    """What loads the images of requests, and the bytes that a request's body may have."""
    if vision is None:
        return NoImages(), section.max_body_bytes
    own = section.images
    limits = ImageLimits(own.max_count, own.max_bytes, own.max_request_bytes, own.max_held_mib << 20)
    inspector = ImageInspector(own.max_pixels)
    fetcher = FetchProcess(own.fetch_hosts, own.max_bytes, own.fetch_timeout)
    in_base64 = own.max_request_bytes * 4 // 3
    return ImageLoader(limits, vision, inspector, fetcher), section.max_body_bytes + in_base64


def _describe(condition: Condition) -> dict[str, Any]:
    node = condition.node
    return {
        "name": node.name,
        "role": node.role,
        "state": node.state,
        "incarnation": node.incarnation,
        "host": node.register.host,
        "pid": node.register.pid,
        "config": node.register.effective_config,
        "graphs": msgspec.to_builtins(node.register.graphs),
        "load": msgspec.to_builtins(node.load),
        "counters": msgspec.to_builtins(node.counters),
        "assigned": len(node.rooms),
        "reachable": node.reachable,
        "weight": round(condition.weight, 3),
        "breaker": condition.breaker,
        "bad_peers": condition.bad_peers,
        "as_of": node.as_of,
    }
