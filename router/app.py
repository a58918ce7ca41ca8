"""Composition root of the router: builds all objects from the config; defines the order of start-up and drain."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

import zmq
from aiohttp import web

from common.checkpoint.chat_template_file import find_chat_template
from common.checkpoint.model_config import ModelConfig, model_fingerprint
from common.checkpoint.model_manifest import check_manifests
from common.checkpoint.vision_config import VisionConfig
from common.config import Resolved
from common.config.run_directory import control_address, event_directory
from common.config.schema import Router
from common.config.unread import refuse_unread, unread_by_text_models
from common.errors import ModelError, Unavailable
from common.ipc import LinkSecurity, check_bind
from common.ipc.from_config import link_security
from common.messages.identity import new_incarnation
from common.observability.event_log import EventLog, event_log
from common.observability.logs import Log
from router.admin_routes import AdminRoutes
from router.apis.generate_routes import GenerateRoutes
from router.apis.messages_routes import MessagesRoutes
from router.apis.responses_routes import ResponsesRoutes
from router.chat_prompts import ChatPrompts
from router.client import View
from router.control_plane import ControlPlane
from router.control_routes import ControlRoutes
from router.dispatch_limits import DispatchLimits
from router.dispatcher import Dispatcher
from router.fetch_process import FetchProcess
from router.field_rules import UnknownFields
from router.flush import flush_caches
from router.from_config import answer_style, http_listeners, registration_rules, state_limit
from router.http_listeners import HttpListeners
from router.image_inspector import ImageInspector
from router.images import ImageLimits, ImageLoader, Images, NoImages
from router.metrics import RouterMetrics
from router.node_health import NodeHealth
from router.node_registry import Node, NodeRegistry
from router.openai_routes import OpenAiRoutes
from router.openapi.routes import OpenApiRoutes
from router.placement import decode_cost, make_policy, prefill_cost
from router.request_checks import ServedModel
from router.return_watch import ReturnWatch
from router.server_info import of_nodes, of_service
from router.spawner import Spawner
from router.status_routes import VERSION, ClusterView, StatusRoutes
from router.text_pool import TextPool
from router.text_service import TextService
from router.tokenizer import Tokenizer
from router.tokenizer_info import tokenizer_info
from router.tokenizer_routes import TokenizerRoutes

SHUTTING_DOWN = "this router is shutting down"


@dataclass(slots=True)
class RouterApp:
    """A running router.

    `drain` ends it: it reports "not ready", lets requests finish and closes the sockets.
    """

    resolved: Resolved
    log: Log
    control: ControlPlane
    registry: NodeRegistry
    dispatcher: Dispatcher
    spawner: Spawner
    text_pool: TextPool
    images: Images
    context: zmq.Context[zmq.Socket[bytes]]
    security: LinkSecurity
    model: ServedModel
    incarnation: str
    events: EventLog
    # set last: `openai` and the handlers of `http` call this object
    limited: ServedModel = field(init=False)  # the model as it was served last
    openai: OpenAiRoutes = field(init=False)
    http: HttpListeners = field(init=False)
    draining: bool = False
    paused: bool = False  # refuses new requests as `draining` does, but an operator can resume it

    def __post_init__(self) -> None:
        self.limited = self.model

    async def start(self) -> None:
        """Listen for nodes, start the text workers, then listen for clients. Raises ConfigError or ModelError."""
        self.control.start(self.registry, self.dispatcher)
        try:
            await self.text_pool.start()
        except BaseException:
            await self.spawner.close()
            raise
        await self.http.start()

    @property
    def runner(self) -> web.AppRunner:
        """The runner of the public API listener."""
        return self.http.public

    async def drain(self) -> None:
        """Refuse new requests, let those in flight finish for up to health.drain_timeout seconds, then close."""
        self.draining = True
        self.log.info("draining", requests=self.openai.active)
        deadline = time.monotonic() + self.resolved.cluster.health.drain_timeout
        while self.openai.active and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.dispatcher.end_all(Unavailable(f"{SHUTTING_DOWN}, and the answer was not ready in time"))
        # Gives the last answers time to be sent and cancels the rest, so that aborts reach the nodes before the socket
        # closes.
        await self.http.close()
        await asyncio.sleep(0.05)
        self.control.close()
        self.events.close()
        await self.images.close()
        await self.text_pool.close()
        await self.spawner.close()
        self.security.close()
        self.context.term()

    def served(self) -> ServedModel:
        """The served model, with the context length that every node supports."""
        limit = self.registry.max_model_len
        if limit is None:
            return self.model
        limit = min(limit, self.model.max_model_len)
        if self.limited.max_model_len != limit:
            self.limited = replace(self.model, max_model_len=limit)
        return self.limited

    def admitting(self) -> ServedModel:
        """Return `served()` for a request that generates. Raises Unavailable while draining or paused."""
        if self.draining:
            raise Unavailable(f"{SHUTTING_DOWN}; try again in a few seconds")
        if self.paused:
            raise Unavailable(
                "this router is paused and takes no new requests until its operator resumes it; use another router"
            )
        return self.served()

    def not_ready(self) -> str | None:
        """Why the router cannot serve requests now; None if it can."""
        if self.draining or self.paused:
            return "draining"
        for role in ("prefill", "decode"):
            if not self.registry.count(role):
                expected = self.registry.expected(role)
                back = f"; expected back: {', '.join(expected)}" if expected else ""
                return f"no {role} node has been up for {self.registry.missing_for(role):.0f} s{back}"
        return None

    def missing_nodes(self) -> list[dict[str, str]]:
        """Nodes of the cluster file that take no requests now."""
        cluster = self.resolved.cluster
        up = {(node.role, node.name) for node in self.registry if node.state == "up"}
        configured = [("prefill", node.name) for node in cluster.prefill.nodes]
        configured += [("decode", node.name) for node in cluster.decode.nodes]
        return [{"name": name, "role": role} for role, name in configured if (role, name) not in up]

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the router on behalf of an operator."""
        self.paused = paused
        self.log.info("paused" if paused else "resumed", requests=self.dispatcher.active)

    def server_info(self, view: View) -> dict[str, Any]:
        served = self.served()
        info = of_service(served, self.not_ready() is None, self.registry)
        if view >= View.CLUSTER:
            info |= {
                "model_path": served.path,
                "missing_nodes": self.missing_nodes(),
                "active_requests": self.dispatcher.active,
                "refused_messages": self.control.refused_messages,
                "config": {
                    path: {"value": value, "origin": origin} for path, value, origin in self.resolved.rows()
                },
                **of_nodes(self.dispatcher.health.conditions(self.registry), view),
            }
        if view >= View.OPERATOR:
            info["incarnation"] = self.incarnation
        return info


def build(resolved: Resolved, log: Log) -> RouterApp:
    """Compose a router. Raises ConfigError or ModelError, each naming the remedy."""
    cluster = resolved.cluster
    address = control_address(resolved)
    path = resolved.model_path
    # Only the manifest of the target, and without weights: the router reads just headers, and nodes check the draft.
    check_manifests([each for each in resolved.manifests if each[0] == path], weights=False)
    config = ModelConfig.load(path)
    if config.vision is None:
        refuse_unread(unread_by_text_models(cluster), resolved.origins)
    tokenizer = Tokenizer(path)
    # The placeholder token of an image may lie outside the vocabulary: it has no embedding.
    placeholder = -1 if config.vision is None else config.vision.image_token_id
    if tokenizer.vocab_size > max(config.vocab_size, placeholder + 1):
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has only {config.vocab_size}"
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
        answers=answer_style(resolved, tokenizer, log),
        states=state_limit(cluster.model, config.hidden_size),
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
        model_fingerprint(path, cluster.model.max_model_len),
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
            "prefill": make_policy(cluster.router.placement.prefill, prefill_cost),
            "decode": make_policy(cluster.router.placement.decode, decode_cost),
        },
        control.send,
        DispatchLimits(
            max_attempts=cluster.router.max_attempts,
            max_requests=cluster.router.max_requests,
            request_timeout=cluster.router.request_timeout,
            placement_wait=cluster.router.placement_wait,
            retry_ratio=cluster.router.retry_ratio,
            queue_wait=cluster.router.queue_wait,
            max_crashes=cluster.router.max_crashes,
            reserved_tokens=cluster.decode.reserved_tokens,
            requests_per_node=cluster.decode.max_running + cluster.decode.max_transferring,
        ),
        metrics,
        log,
        health,
        events,
    )
    spawner = Spawner()
    images, body_bytes = _images(spawner, cluster.router, config.vision)
    template = resolved.chat_template_path
    if find_chat_template(path, template) is None:
        log.warning(
            "this model has no chat template: /v1/chat/completions is refused; set model.chat_template",
            model=str(path),
        )
    text_pool = TextPool(spawner, path, body_bytes, log, dict(resolved.manifests).get(path), template)
    texts = TextService(text_pool, tokenizer, UnknownFields(log, cluster.router.strict_fields))
    router = RouterApp(
        resolved,
        log,
        control,
        registry,
        dispatcher,
        spawner,
        text_pool,
        images,
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
    openai = router.openai = OpenAiRoutes(dispatcher, tokenizer, texts, router.admitting, images, most, log)
    generate = GenerateRoutes(openai, texts, tokenizer)
    responses = ResponsesRoutes(openai, texts, model.name)
    openapi = OpenApiRoutes(VERSION)
    messages = MessagesRoutes(openai, texts, ChatPrompts(texts, images), router.admitting)
    status = StatusRoutes(view, router.served)
    tokens = TokenizerRoutes(texts, router.served, tokenizer_info(path, template))
    controls = ControlRoutes(dispatcher, lambda: flush_caches(registry, control.send), log)
    admin = AdminRoutes(router.set_paused, lambda: openai.active)

    def add_routes(app: web.Application) -> None:
        for routes in (openai, generate, responses, messages, openapi, status, tokens, controls):
            routes.add_to(app)

    router.http = http_listeners(resolved, body_bytes, add_routes, admin.add_to, time.time, log)
    return router


def _images(spawner: Spawner, section: Router, vision: VisionConfig | None) -> tuple[Images, int]:
    """Return the image loader and the largest accepted body, in bytes."""
    if vision is None:
        return NoImages(), section.max_body_bytes
    own = section.images
    limits = ImageLimits(own.max_count, own.max_bytes, own.max_request_bytes, own.max_held_mib << 20)
    inspector = ImageInspector(spawner, own.max_pixels)
    fetcher = FetchProcess(spawner, own.fetch_hosts, own.max_bytes, own.fetch_timeout)
    in_base64 = own.max_request_bytes * 4 // 3
    return ImageLoader(limits, vision, inspector, fetcher), section.max_body_bytes + in_base64
