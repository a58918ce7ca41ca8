"""Composition root: config to objects. Below this file nobody sees a config."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from common.checkpoint.model_manifest import check_manifests
from common.config import Cluster, DecodeNode, Resolved
from common.config.resolve_node import node_plan
from common.config.run_directory import control_address, event_directory
from common.config.schema import Speculation
from common.config.transport_choice import choose_transport
from common.engine.attention.paged import PagedAttention
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import rotary_places
from common.engine.graphs import node_graphs
from common.engine.graphs.rules import PhaseSwitch
from common.engine.ops.triton_kernel import report_compilations
from common.engine.state.pool import KvPool
from common.engine.state.relay_state import RelayState
from common.ipc import LinkSecurity, check_bind
from common.ipc.from_config import link_security
from common.kv_cache.pool_layout import PoolLayout
from common.messages import decode_inbox
from common.messages.identity import NodeRef, new_incarnation
from common.node import graph_start
from common.node.announced_work import COMPILE_SECONDS
from common.node.completion import completion_for
from common.node.overlap import Completion
from common.node.router_link import RouterLink
from common.node.serving_link import serving_link
from common.node.serving_model import ServingModel, load_serving_model, page_space
from common.observability.event_log import EventLog, event_log
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from common.speculation.table import algorithm
from decode_node import node as decode
from decode_node.backups import Backups
from decode_node.batch_rows import BatchRows
from decode_node.draft_watch import DraftWatch, FirstDraftWatch, NoWatch, causes_of
from decode_node.graphs import step_graphs
from decode_node.limits import DecodeLimits
from decode_node.page_table import PageTable
from decode_node.parts import Links, Observation, Scheduling
from decode_node.peers import PeerConnections
from decode_node.retraction import Retraction
from decode_node.speculative.drafters.drafter import DrafterSetup
from decode_node.speculative.drafters.table import make_drafter, make_text_drafts
from decode_node.speculative.rounds import Rounds
from decode_node.speculative.step import SpeculativeStep, no_seconds
from decode_node.speculative.verifier import Acceptor, ChainAcceptor, TreeAcceptor
from decode_node.speculative.verify import Verify
from decode_node.speculative.width_policy import WidthPolicy, batches_of, slots_up_to
from decode_node.step import AutoregressiveStep, DecodeStep
from decode_node.step_rules import FixedWidth, StepRules, TextDrafts, Widths
from decode_node.stopwatch import stopwatch_for
from decode_node.worker import DeviceWorker
from kv_transfer.from_plan import transfer_limits
from kv_transfer.limits import MIB, TransferLimits
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
    """Load, allocate, connect. Raises ConfigError or ModelError with the remedy."""
    cluster = resolved.cluster
    section, own = cluster.decode, cluster.decode_node(name)
    check_manifests(resolved.manifests, True, functools.partial(reporter.report, "verifying"))
    address = control_address(resolved)
    plan = node_plan(cluster, "decode", name, resolved.model_path, resolved.draft_path, address)
    served = load_serving_model(plan, reporter, log)
    reporter.report("allocating")
    device, carried = served.placement.device, served.draft_shape
    relay = RelayState.allocate(section.max_running, served.config.vocab_size, device, carried, served.window)
    trial = functools.partial(torch.zeros, dtype=torch.uint8, device=device)
    served = graph_start.sized(served, lambda: _forwards(cluster, served, relay, trial).graphs)
    incarnation = new_incarnation()
    limits = transfer_limits(plan, served.max_model_len, carried.topk, carried.hidden_bytes)
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved, name)
    endpoint = _endpoint(cluster, own, device, incarnation, limits, security)
    forwards = _forwards(
        cluster, served, relay, lambda nbytes: as_storage(endpoint.allocate(Region.KV, nbytes))
    )
    layout, steps = forwards.layout, forwards.steps
    record_slots = 2 * section.max_transferring  # on the way, and as many again in quarantine
    receiver = Receiver(incarnation, name, endpoint, layout, time.monotonic, limits, record_slots)
    poller = zmq.Poller()
    space = page_space(served, section.prefix_cache)
    reporter.report("capturing")
    graph_start.capture(served, forwards.graphs, log)
    link = serving_link(
        context,
        plan,
        NodeRef(name=name, role="decode", incarnation=incarnation),
        new_incarnation(),
        served,
        layout.total_bytes,
        forwards.graphs,
        decode_inbox.codec,
        security,
        log,
    )
    report_compilations(
        lambda name, seconds: log.warning("kernel compiled late", kernel=name, seconds=seconds),
        lambda: link.announce(COMPILE_SECONDS),
    )
    peers = PeerConnections(context, name, incarnation, receiver, poller, security)
    events = event_log(event_directory(resolved), name, incarnation, log)
    rotary, rows = rotary_places(served.config.rope), BatchRows(section.max_running)
    page_bytes = sum(pool.page_bytes for pool in forwards.pools)
    state_bytes = forwards.pools[0].state_bytes + served.window.nbytes(0)
    retraction = Retraction(space, rows, rotary, page_bytes, section.backup_mib * MIB, state_bytes)
    bounds = DecodeLimits(
        max_running=section.max_running,
        max_transferring=section.max_transferring,
        max_queue=section.max_queue,
        max_model_len=served.max_model_len,
        vocab_size=served.config.vocab_size,
        reserved_tokens=section.reserved_tokens,
        skip_ahead=section.skip_ahead,
        drain_timeout=cluster.health.drain_timeout,
    )
    worker = DeviceWorker(
        steps.by_width,
        forwards.table,
        relay,
        Backups(forwards.pools, relay),
        _completion(cluster, device),
    )
    node = decode.DecodeNode(
        incarnation,
        Links(link, peers, poller, receiver),
        Scheduling(space, rows, retraction, steps.rules, bounds),
        worker,
        carried,
        Observation(
            log,
            node_graphs.totals(*forwards.graphs),
            steps.phase_seconds,
            _draft_watch(served, resolved.draft_path, log),
            events=events,
        ),
    )
    return BuiltDecodeNode(node, link, peers, receiver, security, context, events)


def _draft_watch(served: ServingModel, path: Path | None, log: Log) -> DraftWatch:
    if served.draft is None or path is None:
        return NoWatch()
    return FirstDraftWatch(causes_of(path, served.draft.config), log)


@dataclass(frozen=True, slots=True)
class Forwards:
    """The node's step over one KV pool, and its forwards, not captured yet."""

    layout: PoolLayout
    pools: Sequence[KvPool]  # the target's, and the draft's if there is one
    table: PageTable
    steps: DecodeSteps
    graphs: Sequence[node_graphs.NodeGraphs[Any]]


def _forwards(
    cluster: Cluster, served: ServingModel, relay: RelayState, allocate: Callable[[int], torch.Tensor]
) -> Forwards:
    """With a pool of `served.num_pages`, whose bytes come from `allocate`."""
    layout = served.layout
    pool = KvPool(layout, "target", allocate(layout.total_bytes))
    # Branches of draft trees extend past the last token of a request.
    longest = served.max_model_len + 2 * lookahead_slots(cluster.speculation)
    table = PageTable(cluster.decode.max_running, -(-longest // served.page_size), served.placement.device)
    runner = ModelRunner(served.model, pool, PagedAttention(pool, served.config.sliding_windows))
    draft = served.draft_runner(pool)
    pools = [pool] if draft is None else [pool, draft[1]]
    steps = decode_steps(cluster, served, runner, None if draft is None else draft[0], table, relay)
    return Forwards(layout, pools, table, steps, steps.graphs)


def _completion(cluster: Cluster, device: torch.device) -> Callable[[], Completion]:
    return completion_for(device, one_behind=cluster.decode.read_results == "one_behind")


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """The node's steps by width, how they are planned, and their forwards, not captured yet."""

    by_width: Mapping[int, DecodeStep]
    rules: StepRules
    graphs: Sequence[node_graphs.NodeGraphs[Any]]
    phase_seconds: Mapping[str, float]


def decode_steps(
    cluster: Cluster,
    served: ServingModel,
    runner: ModelRunner,
    draft: object,
    table: PageTable,
    relay: RelayState,
) -> DecodeSteps:
    """Compose plain decoding or speculation, as the cluster file says."""
    section, speculation = cluster.decode, cluster.speculation
    device = runner.pool.device
    completion = _completion(cluster, device)
    wanted = PhaseSwitch(section.graphs, poisoned=cluster.process.poison_graphs)
    if not algorithm(speculation.algorithm).drafts:
        graphs = step_graphs.decode_graphs(
            runner, relay, table, wanted, section.max_running, served.max_model_len
        )
        step = AutoregressiveStep(graphs.forward, device, completion)
        return DecodeSteps({0: step}, StepRules(), [graphs], {})
    seconds = no_seconds()

    def of_width(width: int, batches: tuple[int, int]) -> SpeculativeStep:
        smallest, largest = batches
        rounds = Rounds(
            relay,
            table,
            cluster.kv.page_size,
            served.max_model_len,
            lookahead_slots(speculation),
            step_graphs.round_plans(runner, wanted, largest, smallest),
        )
        config = None if served.draft is None else served.draft.config
        setup = DrafterSetup(draft, config, rounds, width, speculation.topk, speculation.nodes)
        drafter = make_drafter(speculation.algorithm, setup)
        acceptor: Acceptor = ChainAcceptor()
        if speculation.topk > 1:
            deepest = drafter.state.walk.ids.shape[1] - 1
            acceptor = TreeAcceptor(drafter.lookahead_slots, deepest, (runner.pool,))
        verify = Verify(runner, rounds, drafter, acceptor)
        watch = stopwatch_for(device)
        return SpeculativeStep(verify, drafter, acceptor, device, completion, watch, seconds)

    widths: Widths = FixedWidth(speculation.steps)
    batches = {speculation.steps: (1, section.max_running)}
    if speculation.adaptive != "none":
        slots = slots_up_to(speculation.steps)
        widths, batches = WidthPolicy(slots), batches_of(slots, section.max_running)
    return speculative_steps(
        {width: of_width(width, served_by) for width, served_by in batches.items()},
        widths,
        make_text_drafts(speculation.algorithm, section.max_running),
        seconds,
    )


def speculative_steps(
    steps: Mapping[int, SpeculativeStep],
    widths: Widths,
    drafts: TextDrafts,
    phase_seconds: Mapping[str, float],
) -> DecodeSteps:
    """Steps of one or of several widths; all rows get the pages that the widest needs."""
    ordered = sorted(steps, reverse=True)
    widest = steps[ordered[0]]
    rules = StepRules(widest.tokens_per_step, widest.extra_slots, widths, drafts)
    graphs = [graph for width in ordered for graph in steps[width].graphs]
    return DecodeSteps(steps, rules, graphs, phase_seconds)


def lookahead_slots(speculation: Speculation) -> int:
    """Slots of a request that the widest forward of a round takes."""
    record = algorithm(speculation.algorithm)
    return record.slots(speculation.steps, speculation.topk, speculation.nodes)


def _endpoint(
    cluster: Cluster,
    own: DecodeNode,
    device: torch.device,
    incarnation: str,
    limits: TransferLimits,
    security: LinkSecurity,
) -> ReceiverEndpoint:
    kind = choose_transport(cluster)
    if kind.listens:
        check_bind(f"tcp://{own.host}:{own.bulk_port}", f"decode.nodes[{own.name}].host", security)
    gpu = device.index if device.type == "cuda" else None
    options = kind.read(cluster.transfer)
    return make_receiver(
        kind.receiver, ReceiverSetup(incarnation, options, limits, own.host, own.bulk_port, gpu)
    )
