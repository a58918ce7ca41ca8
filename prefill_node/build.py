"""Composition root of the prefill node: builds all objects from the config. No other module reads the config."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
import zmq

from common.checkpoint.model_manifest import check_manifests
from common.config import Resolved
from common.config.resolve_node import node_plan
from common.config.run_directory import control_address, event_directory, peer_address
from common.config.transport_choice import choose_transport
from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs.rules import PhaseSwitch
from common.engine.ops.triton_kernel import report_compilations
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.errors import ConfigError
from common.grammar.grammars import grammars_for
from common.ipc import Dealer, LinkSecurity, RouterSocket, check_bind
from common.ipc.from_config import link_security
from common.kv_cache.layer_kinds import prompt_grid
from common.messages import image_inbox, prefill_inbox
from common.messages.identity import ROUTER_NAME, NodeRef, control_link_id, new_incarnation
from common.node import graph_start
from common.node.announced_work import COMPILE_SECONDS
from common.node.completion import completion_for
from common.node.registration import registration
from common.node.router_link import RouterLink
from common.node.serving_model import ServingModel, load_serving_model, page_space
from common.observability.event_log import EventLog, event_log
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from kv_transfer.from_plan import transfer_limits
from kv_transfer.sender import Sender
from kv_transfer.transport.base import SenderSetup
from kv_transfer.transport.cuda.pool_memory import as_memory
from kv_transfer.transport.registry import make_sender
from prefill_node.assemble import Computation, assemble
from prefill_node.forwards import Forwards, PromptSizes, prompt_forwards
from prefill_node.graphs.backends.compiled_body import EAGER, CompiledBodies, missing_compiler
from prefill_node.images import Images
from prefill_node.limits import PrefillLimits, whole_chunks
from prefill_node.measure import NOT_MEASURED, MeasuredNode, MeasuredTimes, measure_forwards
from prefill_node.node import PrefillNode
from prefill_node.parts import Links, Observation
from prefill_node.vision_stage import load_vision_stage
from prefill_node.warm_up import warm_up

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
    bodies = compiled_bodies(section.compiler, own.device)
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
    grid = prompt_grid(served.config, served.page_size)
    chunk_tokens = whole_chunks(section.chunk_tokens, grid)
    if chunk_tokens != section.chunk_tokens:
        log.info("chunk size rounded", chunk_tokens=chunk_tokens, grid=grid)
    sizes = PromptSizes(
        wanted=PhaseSwitch(section.graphs, section.enforce_graphs, cluster.process.poison_graphs),
        chunk_tokens=chunk_tokens,
        max_batch=section.max_batch,
        layers=plan.transfer.layers,
        algorithm=plan.speculation.algorithm,
        hidden_states=cluster.model.return_hidden_states,
    )
    served = graph_start.sized(served, lambda: prompt_forwards(sizes, served, make_stage, bodies).graphs)
    space = page_space(served, section.prefix_cache)
    device = served.placement.device
    forwards = prompt_forwards(sizes, served, make_stage, bodies)
    vision = forwards.vision
    layout, carried = forwards.layout, served.draft_shape
    limits = transfer_limits(plan, served.max_model_len, carried.topk, carried.hidden_bytes)
    kind = choose_transport(cluster)
    endpoint = make_sender(kind.sender, SenderSetup(incarnation, kind.read(cluster.transfer), limits))
    endpoint.register(layout, as_memory(forwards.runner.pool.storage))
    peers = RouterSocket(context, address, security)
    sender = Sender(incarnation, name, endpoint, layout, peers.post, time.monotonic, limits)
    sender.addresses = (peers.address,)
    reporter.report("capturing")
    graph_start.capture(served, forwards.graphs, log)
    _warm_up(forwards, served, sizes, log)
    measured = _measured(forwards, served, sizes, log)
    ref = NodeRef(name=name, role="prefill", incarnation=incarnation, peer_address=peers.address)
    register = registration(plan, ref, link_secret, served, forwards.graphs)
    link = RouterLink(context, plan.router, register, prefill_inbox.codec, log, security=security)
    events = event_log(event_directory(resolved), name, incarnation, log)
    report_compilations(
        lambda name, seconds: log.warning("kernel compiled late", kernel=name, seconds=seconds),
        lambda: link.announce(COMPILE_SECONDS),
    )
    computation = Computation(
        forwards,
        AdjustmentRows.allocate(section.max_batch, served.config.vocab_size, device),
        rotary_places(served.config.rope),
        completion_for(device, one_behind=False),
        carried.dtype_name,
        measured,
    )
    bounds = PrefillLimits(
        chunk_tokens=chunk_tokens,
        grid=grid,
        max_batch=section.max_batch,
        max_queue=section.max_queue,
        max_model_len=served.max_model_len,
        vocab_size=served.config.vocab_size,
        drain_timeout=cluster.health.drain_timeout,
        hidden_states=cluster.model.return_hidden_states,
    )
    assembly = assemble(
        Links(incarnation, link, peers, sender, vision.images),
        space,
        computation,
        bounds,
        Observation(log, events=events),
        grammars=grammars_for(resolved.model_path, served.config, log),
    )
    return BuiltPrefillNode(assembly.node, link, peers, sender, vision.images, security, context, events)


def _warm_up(forwards: Forwards, served: ServingModel, sizes: PromptSizes, log: Log) -> None:
    """Run what no graph has run yet, so that the first requests do not wait for kernels to compile."""
    started, layout, rope = time.monotonic(), forwards.layout, served.config.rope
    forwards.attention.warm_up(served.heads, served.placement.dtype, sizes.chunk_tokens, sizes.max_batch)
    device, keeps_state = served.placement.device, layout.num_slots > 0
    warm_up(forwards.target.forward, forwards.draft, layout.page_size, device, rope.axes, keeps_state)
    images_run = forwards.vision.embeds.warm_up()
    log.info("warmed up", encoder_forwards=images_run, seconds=round(time.monotonic() - started, 3))


def _measured(forwards: Forwards, served: ServingModel, sizes: PromptSizes, log: Log) -> MeasuredTimes:
    """Return the times of forwards on a GPU. On a CPU the default curve keeps plans deterministic."""
    device, layout, config = served.placement.device, forwards.layout, served.config
    if device.type != "cuda":
        return NOT_MEASURED
    started = time.monotonic()
    node = MeasuredNode(
        largest=sizes.chunk_tokens,
        longest=served.max_model_len,
        vocab_size=config.vocab_size,
        page_size=layout.page_size,
        device=device,
        axes=config.rope.axes,
        state=layout.num_slots > 0,
    )
    times = measure_forwards(forwards.target.forward, forwards.draft, node)
    shown = {str(tokens): round(ms, 2) for tokens, ms in times.by_tokens.items()}
    seconds = round(time.monotonic() - started, 3)
    log.info("forwards measured", ms=shown, context_ns=round(1e6 * times.context_ms, 3), seconds=seconds)
    return times


def compiled_bodies(compiler: str | None, device_name: str) -> CompiledBodies:
    """Return the compiled bodies that the trial and the final graphs share.

    Raises ConfigError if nothing can be compiled.
    """
    compiler = compiler or EAGER
    if missing := missing_compiler(compiler, torch.device(device_name)):
        raise ConfigError("prefill.compiler", missing)
    return CompiledBodies(compiler)
