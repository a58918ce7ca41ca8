"""Composition root of the prefill node: builds all objects from the config. No other module reads the config."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
import zmq
from torch import Tensor

from common.checkpoint.model_manifest import check_manifests
from common.config import Cluster, Resolved
from common.config.resolve_node import node_plan
from common.config.run_directory import control_addresses, event_directory, peer_address, profile_directory
from common.config.transport_choice import choose_transport
from common.discovery.places import RouterPlaces, router_places
from common.engine.graphs.rules import PhaseSwitch
from common.engine.layers.ranks import ONE_RANK
from common.engine.ops.triton_kernel import report_compilations
from common.errors import ConfigError
from common.garbage import FullCollections
from common.grammar.grammars import grammars_for
from common.ipc import Dealer, RouterSocket, check_bind
from common.ipc.from_config import all_names, link_security
from common.kv_cache.host_plan import HostCopies, NoHostCopies, RankStore
from common.kv_cache.layer_kinds import state_grid
from common.kv_events.publisher import kv_events_of
from common.kv_events.wire import CPU
from common.messages import image_inbox, prefill_inbox
from common.messages.identity import (
    ROUTER_NAME,
    NodeRef,
    control_link_id,
    name_in,
    new_incarnation,
    rank_incarnation,
)
from common.node.announced_work import NO_OTHERS
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
from common.node_names import NodeNames
from common.node_plan import NodePlan
from common.observability.event_log import event_log
from common.observability.logs import Log
from common.observability.start_times import StartTimes
from common.observability.startup import StartupReporter
from kv_transfer.from_plan import transfer_limits
from kv_transfer.ranks.sender_group import SenderGroup
from kv_transfer.sender import Sender
from kv_transfer.transport.base import SenderSetup
from kv_transfer.transport.cuda.pool_memory import as_memory
from kv_transfer.transport.transport_registry import make_sender
from prefill_node.assemble import assemble
from prefill_node.exclusive_worker import ExclusiveWorker
from prefill_node.forwards import Forwards, PromptSizes
from prefill_node.graphs.backends.compiled_body import EAGER, CompiledBodies, missing_compiler
from prefill_node.host_parts import make_host_parts
from prefill_node.images import Images
from prefill_node.limits import PrefillLimits
from prefill_node.loaded_rank import LoadedPromptRank, MakeStage, load_prompt_rank
from prefill_node.node import PrefillNode
from prefill_node.parts import Links, Observation
from prefill_node.ranked_host import OtherVerdicts, StoredByAll
from prefill_node.ranked_worker import RankedWorker
from prefill_node.sending_end import SendingEnd, Sockets
from prefill_node.step_result import Worker
from prefill_node.vision_stage import load_vision_stage

IMAGES_QUEUED = 16  # messages of up to 16 MiB in this process's memory; more wait at the router


@dataclass(slots=True)
class BuiltPrefillNode:
    """A prefill node and everything that must be closed after it."""

    node: PrefillNode
    routers: RouterLinks[prefill_inbox.PrefillMessage]
    end: SendingEnd
    sockets: Sockets
    images: Images
    observation: Observation
    ranks: RankGroup | SoleRank
    watched: Callable[[], AbstractContextManager[None]]  # the watchdog of the other ranks
    host: HostCopies = field(default_factory=NoHostCopies)

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
        self.host.close()
        self.end.sender.close()
        self.routers.close()
        self.end.peers.close()
        self.images.close()
        self.sockets.security.close()
        self.observation.events.close()
        self.sockets.context.term()


def build(
    resolved: Resolved,
    name: str,
    reporter: StartupReporter,
    log: Log,
    shared: SharedParts = ALONE,
    others: RankProcesses | None = None,
) -> BuiltPrefillNode:
    """Load the models, allocate the KV pool and bind the sockets. Raises ConfigError or ModelError with the remedy.

    Args:
        shared: with the other half of a movable node, whose weights this half loads, too.
        others: the processes of the node's other ranks.
    """
    report_compilations(reporter.compiled)
    check_process(name, resolved.cluster.movable.role_of(name) is not None, shared)
    check_manifests(resolved.manifests, True, functools.partial(reporter.report, "verifying"))
    sockets = open_sockets(resolved, name)
    routers = control_addresses(resolved)
    plan = node_plan(resolved.cluster, "prefill", name, resolved.model_path, resolved.draft_path, routers)
    incarnation = new_incarnation()
    reporter.report("connecting")
    ranks = begin_ranks(others, resolved, name, len(plan.devices), incarnation, reporter)
    with ranks.starting():
        return _build(resolved, plan, incarnation, sockets, ranks, shared, reporter.times, log)


def _build(
    resolved: Resolved,
    plan: NodePlan,
    incarnation: str,
    sockets: Sockets,
    ranks: RankGroup | SoleRank,
    shared: SharedParts,
    times: StartTimes,
    log: Log,
) -> BuiltPrefillNode:
    """Build rank 0, while the others build theirs."""
    cluster, name = resolved.cluster, plan.name
    section, health = cluster.prefill, cluster.health
    bodies = compiled_bodies(section.compiler, plan.device)
    link_secret = new_incarnation()
    places = router_places(plan.router, log)
    images = control_link_id(name, incarnation, link_secret, image_inbox.LINK).encode()
    stage_of = functools.partial(_image_stage, resolved, sockets, places, images, ranks, log)
    loaded = load_prompt_rank(plan, prompt_sizes(cluster, plan), ranks, stage_of, bodies, log)
    served = loaded.served
    shared.loaded(served)
    kv_events = kv_events_of(plan.kv_events, log)
    space = page_space(served, section.prefix_cache, kv_events)
    forwards = loaded.forwards()
    vision = forwards.vision
    end = sending_end(resolved, plan, served, forwards, sockets, incarnation)
    computation = loaded.computation(forwards, loaded.capture(forwards, log))
    ranks.report("registering")
    grid = state_grid(served.config, served.page_size)
    tap = functools.partial(kv_events.tap, CPU, lookahead=lookahead_of(served))
    nbytes, of_all = section.host_mib << 20, _stored_by_all(ranks)
    host = make_host_parts(nbytes, grid, forwards, space, ranks.exchange, of_all, tap)
    addresses = [each.decode() for each in ranks.exchange(end.peers.address.encode())]
    group, wrap = _with_ranks(end.sender, addresses, ranks, shared)
    ref = NodeRef(name=name, role="prefill", incarnation=incarnation, peer_address=end.peers.address)
    reports = rank_reports(served, plan.device, ranks.exchange)
    register = registration(plan, ref, link_secret, served, forwards.graphs, reports, times.fields())
    codec, security = prefill_inbox.codec, sockets.security
    routers = router_links(sockets.context, plan.router, places, register, codec, log, security)
    events = event_log(event_directory(resolved), name, incarnation, log)
    directory = functools.partial(profile_directory, resolved)
    profiler = NodeProfiler(name, directory, TorchTrace, shared.recording, log)
    observation = Observation(
        log,
        events=events,
        ranks=ranks.totals,
        kv_events=kv_events,
        profiler=profiler,
        garbage=FullCollections(),
    )
    node = assemble(
        Links(
            incarnation,
            routers,
            end.peers,
            end.sender,
            vision.images,
            group,
            shared.role,
            shared.device or NO_OTHERS,
        ),
        space,
        replace(computation, host=host),
        _limits(cluster, loaded),
        observation,
        wrap,
        grammars=grammars_for(resolved.model_path, served.config, log),
    )
    report_late_compilations(log, node.announce)
    watched = functools.partial(ranks.watched, routers.overdue, health.loop_timeout, health.hung_limit, log)
    ranks.serve()
    return BuiltPrefillNode(
        node, routers, end, sockets, vision.images, observation, ranks, watched, host.copies
    )


def _image_stage(
    resolved: Resolved,
    sockets: Sockets,
    places: RouterPlaces,
    link: bytes,
    ranks: RankGroup | SoleRank,
    log: Log,
    served: ServingModel,
) -> MakeStage:
    """Load the vision part and return what builds its stage. Needs connected ranks.

    Args:
        link: identity of this node's sockets to the routers, over which images arrive.
    """
    cluster = resolved.cluster
    return load_vision_stage(
        resolved.model_path,
        served.model,
        replace(served.placement, ranks=ONE_RANK),
        lambda: [
            Dealer(sockets.context, address, link, ROUTER_NAME, sockets.security, IMAGES_QUEUED)
            for address in places.hosts
        ],
        cluster.prefill.image_bytes,
        cluster.router.images.max_pixels,
        log,
        _give_rows(ranks),
    )


def _limits(cluster: Cluster, loaded: LoadedPromptRank) -> PrefillLimits:
    section, served = cluster.prefill, loaded.served
    return PrefillLimits(
        chunk_tokens=loaded.sizes.chunk_tokens,
        grid=loaded.grid,
        max_batch=section.max_batch,
        max_queue=section.max_queue,
        max_model_len=served.max_model_len,
        vocab_size=served.config.vocab_size,
        drain_timeout=cluster.health.drain_timeout,
        hidden_states=cluster.model.return_hidden_states,
    )


def _give_rows(ranks: RankGroup | SoleRank) -> Callable[[Tensor], object]:
    """Return what hands the rows of an image to the other ranks."""
    if isinstance(ranks, SoleRank):
        return lambda rows: None
    group = ranks.group
    return lambda rows: group.broadcast(rows, 0)


def _stored_by_all(ranks: RankGroup | SoleRank) -> Callable[[RankStore], RankStore]:
    """Return what makes the host memory of all ranks from that of rank 0."""
    if isinstance(ranks, SoleRank):
        return lambda own: own
    ended = ranks.saves_ended
    return lambda own: StoredByAll(own, ended)


def _with_ranks(
    local: Sender, addresses: Sequence[str], ranks: RankGroup | SoleRank, shared: SharedParts
) -> tuple[SenderGroup | None, Callable[[Worker], Worker]]:
    """Return the sender of all ranks, if there are several, and what makes their worker from that of rank 0.

    `addresses` are those of the peer sockets of all ranks.
    """
    if isinstance(ranks, SoleRank):
        local.addresses = tuple(addresses)
        device = shared.device
        return None, lambda worker: worker if device is None else ExclusiveWorker(worker, device)
    group = SenderGroup(local, addresses, ranks.commands, ranks.events)
    verdicts = OtherVerdicts(ranks.board, ranks.size)
    return group, lambda worker: RankedWorker(worker, ranks.send_plan, verdicts, ranks.group.check)


def open_sockets(resolved: Resolved, name: str, rank: int = 0) -> Sockets:
    """Prepare the sockets of one rank of a prefill node. Raises ConfigError for an address that is not allowed."""
    address = peer_address(resolved, name, rank)
    context = zmq.Context[zmq.Socket[bytes]]()
    security = link_security(context, resolved, name)
    check_bind(address, f"prefill.nodes[{name}].peer_address", security)
    return Sockets(context, security, address)


def sending_end(
    resolved: Resolved,
    plan: NodePlan,
    served: ServingModel,
    forwards: Forwards,
    sockets: Sockets,
    incarnation: str,
    rank: int = 0,
) -> SendingEnd:
    """Open the sending end of one rank. `incarnation` is the node's."""
    carried = served.draft_shape
    limits = transfer_limits(plan, served.max_model_len, carried.topk, carried.hidden_bytes)
    kind = choose_transport(resolved.cluster)
    own = rank_incarnation(incarnation, rank)
    endpoint = make_sender(kind.sender, SenderSetup(own, kind.read(resolved.cluster.transfer), limits))
    endpoint.register(forwards.layout, as_memory(forwards.runner.pool.storage))
    peers = RouterSocket(sockets.context, sockets.address, sockets.security)
    names = NodeNames.of(all_names(resolved.cluster))

    def keeps_name(identity: bytes) -> bool:
        """Return whether a connected decode node keeps its name from other processes that have its key."""
        return names.shares_key(name_in(identity)) and peers.reachable(identity)

    sender = Sender(
        incarnation, plan.name, endpoint, forwards.layout, peers.post, time.monotonic, limits, keeps_name
    )
    return SendingEnd(peers, sender)


def prompt_sizes(cluster: Cluster, plan: NodePlan) -> PromptSizes:
    """Return what the cluster file says about prompts."""
    section = cluster.prefill
    return PromptSizes(
        wanted=PhaseSwitch(section.graphs, section.enforce_graphs, cluster.process.poison_graphs),
        chunk_tokens=section.chunk_tokens,
        max_batch=section.max_batch,
        layers=plan.transfer.layers,
        algorithm=plan.speculation.algorithm,
        hidden_states=cluster.model.return_hidden_states,
        loads=section.host_mib > 0,
    )


def compiled_bodies(compiler: str | None, device_name: str) -> CompiledBodies:
    """Return the compiled bodies that the trial and the final graphs share.

    Raises ConfigError if nothing can be compiled.
    """
    compiler = compiler or EAGER
    if missing := missing_compiler(compiler, torch.device(device_name)):
        raise ConfigError("prefill.compiler", missing)
    return CompiledBodies(compiler)
