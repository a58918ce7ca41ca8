"""Composition root of the prefill node: builds all objects from the config. No other module reads the config."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq

from common.checkpoint.model_manifest import check_manifests
from common.config import Resolved
from common.config.resolve_node import node_plan
from common.config.run_directory import control_address, event_directory, peer_address
from common.config.transport_choice import choose_layers, choose_transport
from common.engine.attention.paged import PagedAttention
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs import node_graphs
from common.engine.graphs.ladders import prefill_token_buckets
from common.engine.graphs.node_graphs import NodeGraphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.ops.triton_kernel import report_compilations
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.pool import KvPool
from common.errors import ConfigError
from common.ipc import Dealer, LinkSecurity, RouterSocket, check_bind
from common.ipc.from_config import link_security
from common.kv_cache.pool_layout import PoolLayout
from common.messages import image_inbox, prefill_inbox
from common.messages.identity import ROUTER_NAME, NodeRef, control_link_id, new_incarnation
from common.node import graph_start
from common.node.announced_work import COMPILE_SECONDS
from common.node.completion import completion_for
from common.node.router_link import RouterLink
from common.node.serving_link import serving_link
from common.node.serving_model import ServingModel, load_serving_model, page_space
from common.observability.event_log import EventLog, event_log
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from kv_transfer.from_plan import transfer_limits
from kv_transfer.sender import Sender
from kv_transfer.transport.base import SenderSetup
from kv_transfer.transport.cuda.pool_memory import as_memory
from kv_transfer.transport.registry import make_sender
from prefill_node.draft import BuiltDraft, DraftSetup, PrefillDraft
from prefill_node.draft_table import make_draft
from prefill_node.graphs import prompt_graphs
from prefill_node.graphs.backends.compiled_body import EAGER, CompiledBodies, missing_compiler
from prefill_node.graphs.prefill_extend import PrefillExtend
from prefill_node.images import Images
from prefill_node.limits import PrefillLimits
from prefill_node.node import PrefillNode
from prefill_node.page_sending import ByChunk, ByLayer, PageSending
from prefill_node.parts import Links, Observation, Scheduling
from prefill_node.peer_frames import take_peer_frames
from prefill_node.send_orders import SendOrders
from prefill_node.signalled_attention import SignalledAttention
from prefill_node.step import PrefillStep
from prefill_node.vision_stage import VisionStage, load_vision_stage
from prefill_node.warm_up import warm_up
from prefill_node.worker import DeviceWorker

IMAGES_QUEUED = 16  # messages of up to 16 MiB in this process's memory; more wait at the router


@dataclass(slots=True)
class BuiltPrefillNode:
    """A prefill node and everything that must be closed after it."""

    node: PrefillNode
    link: RouterLink[prefill_inbox.PrefillMessage]
    peers: RouterSocket
    sender: Sender
    images: Images
    security: LinkSecurity
    context: zmq.Context[zmq.Socket[bytes]]
    events: EventLog

    def start(self) -> None:
        self.link.start()

    def run(self) -> None:
        self.node.run()

    def overdue(self) -> float:
        return self.link.overdue()

    def drain(self) -> None:
        self.node.life.drain()

    def close(self) -> None:
        self.sender.close()
        self.link.close()
        self.peers.close()
        self.images.close()
        self.security.close()
        self.events.close()
        self.context.term()


def build(resolved: Resolved, name: str, reporter: StartupReporter, log: Log) -> BuiltPrefillNode:
    """Load the models, allocate the KV pool and bind the sockets. Raises ConfigError or ModelError with the remedy."""
    cluster = resolved.cluster
    section, own = cluster.prefill, cluster.prefill_node(name)
    check_manifests(resolved.manifests, True, functools.partial(reporter.report, "verifying"))
    address = peer_address(resolved, name)
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved, name)
    check_bind(address, f"prefill.nodes[{name}].peer_address", security)
    bodies = _bodies(section.compiler, own.device)
    router = control_address(resolved)
    plan = node_plan(cluster, "prefill", name, resolved.model_path, resolved.draft_path, router)
    served = load_serving_model(plan, reporter, log)
    incarnation = new_incarnation()
    link_secret = new_incarnation()
    images = control_link_id(name, incarnation, link_secret, image_inbox.LINK).encode()
    make_stage = load_vision_stage(
        resolved.model_path,
        served.model,
        served.placement,
        lambda: Dealer(context, router, images, ROUTER_NAME, security, IMAGES_QUEUED),
        section.image_bytes,
        cluster.router.images.max_pixels,
        log,
    )
    reporter.report("allocating")
    sizes = Sizes(
        wanted=PhaseSwitch(section.graphs, section.enforce_graphs, cluster.process.poison_graphs),
        chunk_tokens=section.chunk_tokens,
        max_batch=section.max_batch,
        layers=choose_layers(cluster),
        algorithm=cluster.speculation.algorithm,
    )
    served = graph_start.sized(served, lambda: _forwards(sizes, served, make_stage, bodies).graphs)
    space = page_space(served, section.prefix_cache)
    device, page_size = served.placement.device, served.page_size
    forwards = _forwards(sizes, served, make_stage, bodies)
    vision = forwards.vision
    layout, carried = forwards.layout, served.draft_shape
    limits = transfer_limits(plan, served.max_model_len, carried.topk, carried.hidden_bytes)
    kind = choose_transport(cluster)
    endpoint = make_sender(kind.sender, SenderSetup(incarnation, kind.read(cluster.transfer), limits))
    endpoint.register(layout, as_memory(forwards.runner.pool.storage))
    peers = RouterSocket(context, address, security)
    sender = Sender(incarnation, name, endpoint, layout, peers.post, time.monotonic, limits)
    reporter.report("capturing")
    graph_start.capture(served, forwards.graphs, log)
    started = time.monotonic()
    forwards.attention.warm_up(served.config.num_heads, section.chunk_tokens, section.max_batch)
    rope = served.config.rope
    keeps_state = layout.num_slots > 0
    warm_up(forwards.target.forward, forwards.draft, page_size, device, rope.axes, keeps_state)
    images_run = vision.embeds.warm_up()
    log.info("warmed up", encoder_forwards=images_run, seconds=round(time.monotonic() - started, 3))
    completion = completion_for(device, one_behind=False)
    adjustments = AdjustmentRows.allocate(section.max_batch, served.config.vocab_size, device)
    step = PrefillStep(
        forwards.target.forward,
        vision.embeds,
        forwards.draft,
        adjustments,
        rotary_places(rope),
        page_size,
        device,
        completion,
    )
    link = serving_link(
        context,
        plan,
        NodeRef(name=name, role="prefill", incarnation=incarnation, peer_address=peers.address),
        link_secret,
        served,
        layout.total_bytes,
        forwards.graphs,
        prefill_inbox.codec,
        security,
        log,
    )
    events = event_log(event_directory(resolved), name, incarnation, log)
    report_compilations(
        lambda name, seconds: log.warning("kernel compiled late", kernel=name, seconds=seconds),
        lambda: link.announce(COMPILE_SECONDS),
    )
    orders = SendOrders(
        sender, page_size, carried.dtype_name, functools.partial(take_peer_frames, peers, sender)
    )
    bounds = PrefillLimits(
        chunk_tokens=section.chunk_tokens,
        max_batch=section.max_batch,
        max_queue=section.max_queue,
        max_model_len=served.max_model_len,
        vocab_size=served.config.vocab_size,
        drain_timeout=cluster.health.drain_timeout,
    )
    node = PrefillNode(
        incarnation,
        Links(link, peers, sender, vision.images),
        Scheduling(space, forwards.draft.rules, bounds),
        DeviceWorker(step, _sending(forwards.signalled, sender, orders), completion),
        orders,
        Observation(log, node_graphs.totals(*forwards.graphs), events=events),
    )
    return BuiltPrefillNode(node, link, peers, sender, vision.images, security, context, events)


@dataclass(frozen=True, slots=True)
class Forwards:
    """The forwards of a node over one KV pool; `graphs` are not captured yet."""

    layout: PoolLayout
    runner: ModelRunner
    attention: PagedAttention
    signalled: SignalledAttention | None  # wraps the target's attention if pages are sent layer by layer
    target: NodeGraphs[PrefillExtend]
    draft: PrefillDraft
    vision: VisionStage
    graphs: Sequence[NodeGraphs[Any]]  # the graphs of all forwards


def _bodies(compiler: str | None, device_name: str) -> CompiledBodies:
    """Return the compiled bodies that the trial and the final graphs share.

    Raises ConfigError if nothing can be compiled.
    """
    compiler = compiler or EAGER
    if missing := missing_compiler(compiler, torch.device(device_name)):
        raise ConfigError("prefill.compiler", missing)
    return CompiledBodies(compiler)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes and features that the forwards must support."""

    wanted: PhaseSwitch
    chunk_tokens: int
    max_batch: int
    layers: bool  # pages are sent layer by layer
    algorithm: str  # speculative algorithm


def _forwards(
    sizes: Sizes,
    served: ServingModel,
    make_stage: Callable[[PhaseSwitch], VisionStage],
    bodies: CompiledBodies,
) -> Forwards:
    """Compose the forwards over a pool of `served.num_pages`."""
    layout = served.layout
    storage = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=served.placement.device)
    pool = KvPool(layout, "target", storage)
    buckets = prefill_token_buckets(sizes.chunk_tokens)
    attention = PagedAttention(pool, served.config.sliding_windows, buckets)
    signalled = SignalledAttention(attention) if sizes.layers else None
    runner = ModelRunner(served.model, pool, signalled or attention)
    drafting = _draft(sizes, served, runner)
    target = prompt_graphs.prefill_graphs(
        runner, sizes.wanted, sizes.chunk_tokens, sizes.max_batch, drafting.draft.hidden_mode, bodies
    )
    vision = make_stage(sizes.wanted)
    graphs: list[NodeGraphs[Any]] = [target, *drafting.graphs, *vision.graphs]
    return Forwards(layout, runner, attention, signalled, target, drafting.draft, vision, graphs)


def _draft(sizes: Sizes, served: ServingModel, target: ModelRunner) -> BuiltDraft:
    """Build the draft's part of a step. The loaded draft already shares the target's embedding and LM head."""
    made, loaded = served.draft_runner(target.pool), served.draft
    runner = None if made is None else made[0]
    plan = prompt_graphs.DraftPrefillPlan(target, sizes.wanted, sizes.chunk_tokens)
    setup = DraftSetup(runner, None if loaded is None else loaded.config, plan)
    return make_draft(sizes.algorithm, setup)


def _sending(signalled: SignalledAttention | None, sender: Sender, orders: SendOrders) -> PageSending:
    return ByChunk(sender) if signalled is None else ByLayer(signalled, sender, orders.at_break)
