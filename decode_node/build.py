"""Composition root of the decode node: builds all objects from the config. No other module reads the config."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import zmq

from common.checkpoint.model_manifest import check_manifests
from common.config import Cluster, Resolved
from common.config.node_entries import own_host
from common.config.resolve_node import node_plan
from common.config.run_directory import control_addresses, event_directory, profile_directory
from common.config.transport_choice import choose_transport
from common.discovery.places import router_places
from common.engine.graphs.rules import PhaseSwitch
from common.engine.ops.triton_kernel import report_compilations
from common.garbage import FullCollections
from common.grammar.grammars import grammars_for
from common.grammar.model_tokenizer import has_tokenizer
from common.ipc import check_bind
from common.ipc.from_config import link_security
from common.kv_events.publisher import kv_events_of
from common.kv_events.wire import CPU
from common.messages import decode_inbox
from common.messages.identity import NodeRef, new_incarnation, rank_incarnation
from common.node.announced_work import NO_OTHERS
from common.node.host_share import HostShare
from common.node.late_compilations import report_late_compilations
from common.node.profiles import NodeProfiler
from common.node.ranks.from_config import begin_ranks
from common.node.ranks.group import RankGroup
from common.node.ranks.processes import RankProcesses
from common.node.ranks.rank_reports import rank_reports
from common.node.ranks.sole_rank import SoleRank
from common.node.registration import registration
from common.node.router_links import RouterLinks, router_links
from common.node.serving_model import ServingModel, lookahead_of, page_space
from common.node.shared_parts import ALONE, SharedParts, check_process
from common.node.torch_trace import TorchTrace
from common.node_plan import NodePlan
from common.observability.event_log import event_log
from common.observability.logs import Log
from common.observability.start_times import StartTimes
from common.observability.startup import StartupReporter
from decode_node import node as decode
from decode_node.assemble import assemble
from decode_node.draft_watch import DraftWatch, FirstDraftWatch, NoWatch, causes_of
from decode_node.exclusive_worker import ExclusiveWorker
from decode_node.forwards import Forwards
from decode_node.host_fetches import AppliedFetches, HostFetches
from decode_node.host_parts import host_share
from decode_node.limits import DecodeLimits
from decode_node.loaded_rank import load_rank
from decode_node.parts import Links, Observation
from decode_node.peers import PeerConnections
from decode_node.ranked_host import FetchedByAll
from decode_node.ranked_worker import RankedWorker
from decode_node.receiving_end import ReceivingEnd
from decode_node.step_result import Worker
from decode_node.steps import StepSizes
from kv_transfer.from_plan import transfer_limits
from kv_transfer.limits import MIB
from kv_transfer.ranks.receiver_group import ReceiverGroup
from kv_transfer.receiver import Receiver
from kv_transfer.receiving import PageReceiver
from kv_transfer.transport.base import ReceiverSetup
from kv_transfer.transport.transport_registry import make_receiver


@dataclass(slots=True)
class BuiltDecodeNode:
    """A node and the resources that must be closed after it."""

    node: decode.DecodeNode
    routers: RouterLinks[decode_inbox.DecodeMessage]
    peers: PeerConnections
    receiver: PageReceiver
    end: ReceivingEnd
    observation: Observation
    ranks: RankGroup | SoleRank
    watched: Callable[[], AbstractContextManager[None]]  # the watchdog of the other ranks
    host: HostShare | None = None

    def start(self) -> None:
        """Begin to serve. Raises ConfigError if the sockets of KV events cannot be bound."""
        self.observation.kv_events.start()
        self.routers.start()

    def run(self) -> None:
        with self.watched():
            self.node.run()

    def overdue(self) -> float:
        return self.routers.overdue()

    def drain(self) -> None:
        self.node.life.drain()

    def close(self) -> None:
        self.ranks.close()
        self.observation.kv_events.close()
        if self.host is not None:
            self.host.store.close()
        self.receiver.shutdown()
        self.routers.close()
        self.peers.close()
        self.observation.events.close()
        self.end.close()


def build(
    resolved: Resolved,
    name: str,
    reporter: StartupReporter,
    log: Log,
    shared: SharedParts = ALONE,
    others: RankProcesses | None = None,
) -> BuiltDecodeNode:
    """Load the models, allocate the KV pool and bind the sockets. Raises ConfigError or ModelError with the remedy.

    Args:
        shared: with the other half of a movable node.
        others: the processes of the node's other ranks.
    """
    report_compilations(reporter.compiled)
    check_process(name, resolved.cluster.movable.role_of(name) is not None, shared)
    check_manifests(resolved.manifests, True, functools.partial(reporter.report, "verifying"))
    routers = control_addresses(resolved)
    plan = node_plan(resolved.cluster, "decode", name, resolved.model_path, resolved.draft_path, routers)
    incarnation = new_incarnation()
    reporter.report("connecting")
    ranks = begin_ranks(others, resolved, name, len(plan.devices), incarnation, reporter)
    with ranks.starting():
        return _build(resolved, plan, incarnation, ranks, shared, reporter.times, log)


def _build(
    resolved: Resolved,
    plan: NodePlan,
    incarnation: str,
    ranks: RankGroup | SoleRank,
    shared: SharedParts,
    times: StartTimes,
    log: Log,
) -> BuiltDecodeNode:
    """Build rank 0, while the others build theirs."""
    cluster, name = resolved.cluster, plan.name
    section, health = cluster.decode, cluster.health
    sizes = step_sizes(cluster, has_tokenizer(resolved.model_path))
    loaded = load_rank(plan, sizes, ranks, log, shared.model)
    served = loaded.served
    end = receiving_end(resolved, plan, served, incarnation)
    forwards = loaded.forwards(end.allocate)
    local = end.receiver(forwards.layout)
    poller = zmq.Poller()
    receiver, wrap = _with_ranks(local, end, forwards, ranks, poller, shared)
    kv_events = kv_events_of(plan.kv_events, log)
    space = page_space(served, section.prefix_cache, kv_events)
    loaded.capture(forwards, log)
    ranks.report("registering")
    tap = functools.partial(kv_events.tap, CPU, lookahead=lookahead_of(served))
    host = host_share(section.host_mib << 20, forwards, ranks.exchange, space)
    ref = NodeRef(name=name, role="decode", incarnation=incarnation)
    reports = rank_reports(served, plan.device, ranks.exchange)
    register = registration(plan, ref, new_incarnation(), served, forwards.graphs, reports, times.fields())
    codec, places = decode_inbox.codec, router_places(plan.router, log)
    routers = router_links(end.context, plan.router, places, register, codec, log, end.security)
    peers = PeerConnections(end.context, name, incarnation, receiver, poller, end.security)
    events = event_log(event_directory(resolved), name, incarnation, log)
    bounds = DecodeLimits(
        max_running=section.max_running,
        max_transferring=section.max_transferring,
        max_queue=section.max_queue,
        max_model_len=served.max_model_len,
        vocab_size=served.config.vocab_size,
        reserved_tokens=section.reserved_tokens,
        skip_ahead=section.skip_ahead,
        drain_timeout=health.drain_timeout,
        hidden_states=cluster.model.return_hidden_states,
    )
    watch = _draft_watch(served, resolved.draft_path, log)
    directory = functools.partial(profile_directory, resolved)
    profiler = NodeProfiler(name, directory, TorchTrace, shared.recording, log)
    observation = Observation(
        log,
        drafts=watch,
        events=events,
        ranks=ranks.totals,
        kv_events=kv_events,
        profiler=profiler,
        garbage=FullCollections(),
    )
    assembly = assemble(
        Links(incarnation, routers, peers, poller, receiver, shared.role, shared.device or NO_OTHERS),
        space,
        replace(loaded.computation(forwards), host=host, tap=tap, of_all=_fetched_by_all(ranks)),
        bounds,
        section.backup_mib * MIB,
        observation,
        wrap,
        grammars_for(resolved.model_path, served.config, log),
    )
    report_late_compilations(log, assembly.node.announce)
    watched = functools.partial(ranks.watched, routers.overdue, health.loop_timeout, health.hung_limit, log)
    ranks.serve()
    return BuiltDecodeNode(assembly.node, routers, peers, receiver, end, observation, ranks, watched, host)


def receiving_end(
    resolved: Resolved, plan: NodePlan, served: ServingModel, incarnation: str, rank: int = 0
) -> ReceivingEnd:
    """Open the receiving end of one rank. `incarnation` is the node's. Raises ConfigError."""
    cluster, device = resolved.cluster, served.placement.device
    section, own, carried = cluster.decode, cluster.decode_node(plan.name), served.draft_shape
    limits = transfer_limits(plan, served.max_model_len, carried.topk, carried.hidden_bytes)
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved, plan.name)
    kind = choose_transport(cluster)
    # Prefill nodes learn the port in the handshake.
    port = own.bulk_port if rank == 0 else 0
    gpu = device.index if device.type == "cuda" else None
    host = own_host(cluster, own.host, f"decode.nodes[{plan.name}].host")
    if kind.listens:
        check_bind(f"tcp://{host}:{port}", f"decode.nodes[{plan.name}].host", security)
    options = kind.read(cluster.transfer)
    setup = ReceiverSetup(rank_incarnation(incarnation, rank), options, limits, host, port, gpu)
    return ReceivingEnd(
        node=plan.name,
        incarnation=incarnation,
        endpoint=make_receiver(kind.receiver, setup),
        limits=limits,
        # on the way, and as many again in quarantine
        record_slots=2 * section.max_transferring,
        context=context,
        security=security,
    )


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


def _fetched_by_all(ranks: RankGroup | SoleRank) -> Callable[[HostFetches], AppliedFetches]:
    """Return what makes the host memory of all ranks from that of rank 0."""
    if isinstance(ranks, SoleRank):
        return lambda own: own
    return lambda own: FetchedByAll(own, ranks.board, ranks.size)


def _with_ranks(
    local: Receiver,
    end: ReceivingEnd,
    forwards: Forwards,
    ranks: RankGroup | SoleRank,
    poller: zmq.Poller,
    shared: SharedParts,
) -> tuple[PageReceiver, Callable[[Worker], Worker]]:
    """Return the receiver of all ranks, and what makes the worker of all ranks from that of rank 0.

    Reports of the other ranks wake the node through `poller`.
    """
    if isinstance(ranks, SoleRank):
        device = shared.device
        return local, lambda worker: worker if device is None else ExclusiveWorker(worker, device)
    group = ReceiverGroup(local, forwards.layout, end.record_slots, ranks.commands, ranks.events)
    for descriptor in group.descriptors:
        poller.register(descriptor, zmq.POLLIN)
    return group, lambda worker: RankedWorker(worker, ranks.send_plan, ranks.saves_ended, ranks.group.check)
