"""Composition root of the decode node: builds all objects from the config. No other module reads the config."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from common.checkpoint.model_manifest import check_manifests
from common.config import Cluster, Resolved
from common.config.resolve_node import node_plan
from common.config.run_directory import control_address, event_directory
from common.config.transport_choice import choose_transport
from common.config.transport_kind import TransportKind
from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs.rules import PhaseSwitch
from common.engine.ops.triton_kernel import report_compilations
from common.engine.state.relay_state import RelayState
from common.grammar.grammars import grammars_for
from common.grammar.model_tokenizer import has_tokenizer
from common.ipc import LinkSecurity, check_bind
from common.ipc.from_config import link_security
from common.messages import decode_inbox
from common.messages.identity import NodeRef, new_incarnation
from common.node import graph_start
from common.node.announced_work import COMPILE_SECONDS
from common.node.registration import registration
from common.node.router_link import RouterLink
from common.node.serving_model import ServingModel, load_serving_model, page_space
from common.observability.event_log import EventLog, event_log
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from decode_node import node as decode
from decode_node.assemble import Computation, assemble
from decode_node.draft_watch import DraftWatch, FirstDraftWatch, NoWatch, causes_of
from decode_node.forwards import step_forwards
from decode_node.limits import DecodeLimits
from decode_node.parts import Links, Observation
from decode_node.peers import PeerConnections
from decode_node.steps import StepSizes
from kv_transfer.from_plan import transfer_limits
from kv_transfer.limits import MIB
from kv_transfer.receiver import Receiver
from kv_transfer.transport.base import ReceiverEndpoint, ReceiverSetup, Region
from kv_transfer.transport.cuda.pool_memory import as_storage
from kv_transfer.transport.registry import make_receiver


@dataclass(slots=True)
class BuiltDecodeNode:
    """A node and the resources that must be closed after it."""

    node: decode.DecodeNode
    link: RouterLink[decode_inbox.DecodeMessage]
    peers: PeerConnections
    receiver: Receiver
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
        self.receiver.shutdown()
        self.link.close()
        self.peers.close()
        self.security.close()
        self.events.close()
        self.context.term()


def build(resolved: Resolved, name: str, reporter: StartupReporter, log: Log) -> BuiltDecodeNode:
    """Load the models, allocate the KV pool and bind the sockets. Raises ConfigError or ModelError with the remedy."""
    cluster = resolved.cluster
    section, own = cluster.decode, cluster.decode_node(name)
    check_manifests(resolved.manifests, True, functools.partial(reporter.report, "verifying"))
    address = control_address(resolved)
    plan = node_plan(cluster, "decode", name, resolved.model_path, resolved.draft_path, address)
    served = load_serving_model(plan, reporter, log)
    reporter.report("allocating")
    device, carried = served.placement.device, served.draft_shape
    relay = RelayState.allocate(
        section.max_running, served.config.vocab_size, device, carried, served.state.window
    )
    sizes = step_sizes(cluster, has_tokenizer(resolved.model_path))
    trial = functools.partial(torch.zeros, dtype=torch.uint8, device=device)
    served = graph_start.sized(served, lambda: step_forwards(sizes, served, relay, trial).graphs)
    incarnation = new_incarnation()
    limits = transfer_limits(plan, served.max_model_len, carried.topk, carried.hidden_bytes)
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved, name)
    kind, gpu = choose_transport(cluster), device.index if device.type == "cuda" else None
    setup = ReceiverSetup(incarnation, kind.read(cluster.transfer), limits, own.host, own.bulk_port, gpu)
    endpoint = _endpoint(kind, setup, f"decode.nodes[{name}].host", security)
    forwards = step_forwards(
        sizes, served, relay, lambda nbytes: as_storage(endpoint.allocate(Region.KV, nbytes))
    )
    layout = forwards.layout
    record_slots = 2 * section.max_transferring  # on the way, and as many again in quarantine
    receiver = Receiver(incarnation, name, endpoint, layout, time.monotonic, limits, record_slots)
    poller = zmq.Poller()
    space = page_space(served, section.prefix_cache)
    reporter.report("capturing")
    graph_start.capture(served, forwards.graphs, log)
    ref = NodeRef(name=name, role="decode", incarnation=incarnation)
    register = registration(plan, ref, new_incarnation(), served, forwards.graphs)
    link = RouterLink(context, plan.router, register, decode_inbox.codec, log, security=security)
    report_compilations(
        lambda name, seconds: log.warning("kernel compiled late", kernel=name, seconds=seconds),
        lambda: link.announce(COMPILE_SECONDS),
    )
    peers = PeerConnections(context, name, incarnation, receiver, poller, security)
    events = event_log(event_directory(resolved), name, incarnation, log)
    computation = Computation(
        forwards,
        relay,
        sizes.completion(device),
        rotary_places(served.config.rope),
        carried,
    )
    bounds = DecodeLimits(
        max_running=section.max_running,
        max_transferring=section.max_transferring,
        max_queue=section.max_queue,
        max_model_len=served.max_model_len,
        vocab_size=served.config.vocab_size,
        reserved_tokens=section.reserved_tokens,
        skip_ahead=section.skip_ahead,
        drain_timeout=cluster.health.drain_timeout,
        hidden_states=cluster.model.return_hidden_states,
    )
    watch = _draft_watch(served, resolved.draft_path, log)
    assembly = assemble(
        Links(incarnation, link, peers, poller, receiver),
        space,
        computation,
        bounds,
        section.backup_mib * MIB,
        Observation(log, drafts=watch, events=events),
        grammars=grammars_for(resolved.model_path, served.config, log),
    )
    return BuiltDecodeNode(assembly.node, link, peers, receiver, security, context, events)


def step_sizes(cluster: Cluster, constrains: bool = True) -> StepSizes:
    """Return what the cluster file says about steps. `constrains`: whether answers can have grammars."""
    section, speculation = cluster.decode, cluster.speculation
    return StepSizes(
        wanted=PhaseSwitch(section.graphs, poisoned=cluster.process.poison_graphs),
        max_running=section.max_running,
        one_behind=section.read_results == "one_behind",
        algorithm=speculation.algorithm,
        steps=speculation.steps,
        topk=speculation.topk,
        nodes=speculation.nodes,
        adaptive=speculation.adaptive != "none",
        forced_drafts=speculation.forced_tokens and constrains,
        hidden_states=cluster.model.return_hidden_states,
    )


def _draft_watch(served: ServingModel, path: Path | None, log: Log) -> DraftWatch:
    if served.draft is None or path is None:
        return NoWatch()
    return FirstDraftWatch(causes_of(path, served.draft.config), log)


def _endpoint(
    kind: TransportKind[Any],
    setup: ReceiverSetup[Any],
    where: str,
    security: LinkSecurity,
) -> ReceiverEndpoint:
    """Build the receiving end of transfers. `where`: the key of the cluster file that names the host it listens on."""
    if kind.listens:
        check_bind(f"tcp://{setup.host}:{setup.port}", where, security)
    return make_receiver(kind.receiver, setup)
