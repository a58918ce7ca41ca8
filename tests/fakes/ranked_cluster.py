"""A prefill and a decode node of several ranks each: rank 0 has the scheduler, all ranks execute the same plans.

Models, drafts, pools and steps are loaded and composed as at a node's start, from a cluster file. Plans reach the other
ranks as bytes. Rank r of the prefill node sends to rank r of the decode node: the same pages as rank 0.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

import decode_node.assemble
import decode_node.step_result
import prefill_node.assemble
import prefill_node.ranked_worker
import prefill_node.step_result
from common.checkpoint.model_config import ModelConfig
from common.config import load_cluster
from common.config.resolve_node import node_plan
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.engine.forward.model_runner import ModelRunner
from common.engine.forward.rotary_places import rotary_places
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.relay_state import RelayState
from common.errors import RankFailed
from common.kv_cache.host_plan import NoHostCopies, RankStore
from common.kv_cache.page_space import PageSpace
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.snapshot_budget import SnapshotBudget
from common.node.completion import Immediate
from common.node.host_share import HostShare
from common.node.host_store import HostStore
from common.node.ranks.board import Board, BoardField
from common.node.serving_model import ServingModel, load_serving_model
from common.observability.logs import Log
from common.observability.startup import StartupReporter
from decode_node.build import step_sizes
from decode_node.forwards import step_forwards
from decode_node.host_parts import host_fetches
from decode_node.page_table import PageTable
from decode_node.step import DecodeSteps
from decode_node.step_plan import Masks, StepPlan
from decode_node.steps import StepSizes, decode_steps
from kv_transfer.copy_plan import Copy, single_rows
from kv_transfer.send_order import SendOrder
from kv_transfer.transport.base import PeerMemory, Ticket
from prefill_node.forwards import Forwards
from prefill_node.host_parts import HostParts, host_prefixes
from prefill_node.rank_work import PromptRankWork
from prefill_node.ranked_host import OtherVerdicts, RankHost, StoredByAll
from prefill_node.step_plan import PromptPlan
from prefill_node.worker import DeviceWorker as PromptWorker
from tests.fakes.loopback import Fabric, LoopbackSender
from tests.fakes.node_cluster import HostShape, NodeCluster, NoDraftModel, Shape
from tests.fakes.plan_wire import Wire, WirePromptWorker, WireWorker
from tests.fakes.thread_ranks import thread_groups
from tests.fakes.waiting import PATIENCE

CLUSTERS = Path(__file__).parents[2] / "deploy" / "clusters"
EAGER = (
    "prefill.graphs=none",
    "decode.graphs=none",
    "prefill.pool_tokens=1024",
    "decode.pool_tokens=1024",
    "model.max_model_len=512",
)
LOG = Log("ranks")


class OtherRanks:
    """Ranks 1 and up of one node: threads that execute what they are told, in order."""

    def __init__(self, size: int) -> None:
        self.groups = thread_groups(size)
        self.ranks = [GroupRanks(group) for group in self.groups]
        self.pools: list[torch.Tensor] = []  # storage of their pools
        self.workers: list[Any] = []
        self._inboxes: list[queue.Queue[Callable[[], object] | None]] = []
        self._threads: list[threading.Thread] = []
        self._done: queue.Queue[BaseException | None] = queue.Queue()

    def start(self, workers: Sequence[Any]) -> None:
        """Start a thread for each worker."""
        self.workers = list(workers)
        for group in self.groups[1:]:
            inbox: queue.Queue[Callable[[], object] | None] = queue.Queue()
            thread = threading.Thread(target=self._run, args=(inbox, group), daemon=True)
            thread.start()
            self._inboxes.append(inbox)
            self._threads.append(thread)

    def during(self, tell: Callable[[Any], object], first: Callable[[], Any]) -> Any:
        """Call `first` on this thread while every other rank calls `tell` with its worker; return its result."""
        for inbox, worker in zip(self._inboxes, self.workers, strict=True):
            inbox.put(lambda worker=worker: tell(worker))  # type: ignore[misc]
        try:
            return first()
        except BaseException:
            self.groups[0].close()
            raise
        finally:
            failures = [self._done.get(timeout=PATIENCE) for _ in self._inboxes]
            for failure in failures:
                if failure is not None and not isinstance(failure, RankFailed):
                    raise failure

    def _run(self, inbox: queue.Queue[Callable[[], object] | None], group: SharedMemoryGroup) -> None:
        while (call := inbox.get()) is not None:
            try:
                call()
                self._done.put(None)
            except BaseException as error:
                group.close()
                self._done.put(error)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for group in self.groups:
            group.close()


@dataclass(frozen=True)
class RankedWorker:
    """The worker of a decode node with several ranks."""

    first: WireWorker
    others: OtherRanks
    wire: Wire[StepPlan]

    def apply(self, plan: StepPlan, /) -> decode_node.step_result.Launched:
        launched: decode_node.step_result.Launched = self.others.during(
            lambda worker: worker.apply(self.wire(plan)), lambda: self.first.apply(plan)
        )
        return launched

    def unsaved(self) -> Collection[int]:
        return {key for worker in (self.first, *self.others.workers) for key in worker.unsaved()}

    def trees(self) -> decode_node.step_result.Trees:
        return self.first.trees()

    def draw(self, masks: Masks, /) -> None:
        self.others.during(lambda worker: worker.draw(masks), lambda: self.first.draw(masks))


@dataclass(frozen=True)
class RankedPromptWorker:
    """The worker of a prefill node with several ranks. Rank 0 posts the transfers of all."""

    inner: prefill_node.ranked_worker.RankedWorker
    others: OtherRanks

    def apply(self, plan: PromptPlan, /) -> prefill_node.step_result.Launched:
        frame = msgspec.msgpack.encode(plan)

        def obey(work: PromptRankWork) -> None:
            work.apply(frame)
            work.turn()

        launched: prefill_node.step_result.Launched = self.others.during(obey, lambda: self.inner.apply(plan))
        return launched

    def granted(self) -> None:
        self.inner.granted()

    def send(self, order: SendOrder, /) -> None:
        self.inner.send(order)


class NoSending:
    """The sending of ranks whose pages rank 0 sends along."""

    def during(self, plan: PromptPlan) -> AbstractContextManager[None]:
        return nullcontext()

    def granted(self) -> None:
        """No-op: only rank 0 sends."""

    def send(self, order: SendOrder) -> None:
        raise AssertionError("only rank 0 gets send orders")


class RankedSender(LoopbackSender):
    """Sends the pages of every rank."""

    def __init__(self, fabric: RankedFabric, incarnation: str) -> None:
        super().__init__(fabric, incarnation)
        self._ranks = fabric

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        pools = zip(self._ranks.prefill.pools, self._ranks.decode.pools, strict=True)
        for source, target in pools:
            for row in single_rows(copies):
                target[row.dst : row.dst + row.length] = source[row.src : row.src + row.length]
        return super().write(peer, copies, generation)


@dataclass(slots=True)
class RankedFabric(Fabric):
    """Connects the pools of equal ranks; their layouts are equal, so rank 0's offsets are those of all."""

    prefill: OtherRanks = None  # type: ignore[assignment]
    decode: OtherRanks = None  # type: ignore[assignment]

    def sender(self, incarnation: str) -> LoopbackSender:
        return RankedSender(self, incarnation)


class RankModel(ServingModel):
    """A rank's share of a model, whose pool transfers handle as that of a node with one rank."""

    @property
    def layout(self) -> PoolLayout:
        return PoolLayout(
            fingerprint=self.kv_fingerprint,
            spec=self.held,
            num_pages=self.num_pages,
            num_slots=self.num_slots,
        )


class Drafting(NoDraftModel):
    """Only names the algorithm: the draft is loaded with the model."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm


class RankedCluster(NodeCluster):
    """A pair of nodes for a cluster file of deploy/clusters, with `size` ranks each."""

    def __init__(
        self, file: str, size: int, overrides: Sequence[str] = (), host: HostShape | None = None
    ) -> None:
        """`host`: of each rank of the prefill node."""
        self.board = Board.create()
        self.rank_stores: list[HostStore] = []  # of the prefill node's ranks 1 and up
        self._resolved = load_cluster(CLUSTERS / file, (*EAGER, *overrides), {})
        cluster = self._resolved.cluster
        self._groups = {"prefill": OtherRanks(size), "decode": OtherRanks(size)}
        self._size = size
        config = ModelConfig.load(self._resolved.model_path)
        super().__init__(
            Shape(
                model=config,
                page_size=cluster.kv.page_size,
                max_running=cluster.decode.max_running,
                prompt_graphs="none",
                draft=Drafting(cluster.speculation.algorithm),
                prefill_cache=not config.gated_delta,
                host=host,
            )
        )

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            group.close()
        self.board.close()

    def make_fabric(self) -> Fabric:
        return RankedFabric(self.clock, prefill=self._groups["prefill"], decode=self._groups["decode"])

    def _served(self, section: str, pool_tokens: int, slots: int) -> ServingModel:
        return self._load(section, self._groups[section].ranks[0] if self._size > 1 else ONE_RANK)

    def _load(self, section: str, ranks: Ranks) -> ServingModel:
        resolved = self._resolved
        plan = node_plan(resolved.cluster, section, f"{section}-0", resolved.model_path, resolved.draft_path)
        served = load_serving_model(plan, StartupReporter(None, LOG), LOG, ranks)
        return RankModel(**{field.name: getattr(served, field.name) for field in fields(served)})

    def make_steps(
        self,
        sizes: StepSizes,
        served: ServingModel,
        runner: ModelRunner,
        draft: object,
        table: PageTable,
        relay: RelayState,
    ) -> DecodeSteps:
        sizes = replace(step_sizes(self._resolved.cluster, False), one_behind=False)
        return decode_steps(sizes, served, runner, draft, table, relay)

    def wrap_worker(self, worker: decode_node.step_result.Worker) -> decode_node.step_result.Worker:
        group = self._groups["decode"]
        group.start([self._decode_rank(group, ranks) for ranks in group.ranks[1:]])
        return RankedWorker(WireWorker(worker), group, Wire(StepPlan))

    def _decode_rank(self, group: OtherRanks, ranks: Ranks) -> decode_node.step_result.Worker:
        served = self._load("decode", ranks)
        rows, device, config = self.shape.max_running, served.placement.device, served.config
        relay = RelayState.allocate(rows, config.vocab_size, device, served.draft_shape, served.state.window)

        def allocate(nbytes: int) -> torch.Tensor:
            group.pools.append(torch.zeros(nbytes, dtype=torch.uint8))
            return group.pools[-1]

        sizes = step_sizes(self._resolved.cluster, False)
        forwards = step_forwards(sizes, served, relay, allocate, self.make_steps)
        rotary = rotary_places(config.rope)
        parts = decode_node.assemble.Computation(forwards, relay, Immediate, rotary, served.draft_shape)
        return decode_node.assemble.device_worker(parts, self.clock, host_fetches(None, self.clock))

    def wrap_prompt_worker(self, worker: prefill_node.step_result.Worker) -> prefill_node.step_result.Worker:
        group = self._groups["prefill"]
        group.start([self._prefill_rank(group, ranks) for ranks in group.ranks[1:]])
        verdicts, check = OtherVerdicts(self.board, self._size), group.groups[0].check
        told = prefill_node.ranked_worker.RankedWorker(
            WirePromptWorker(worker), lambda frame: None, verdicts, check
        )
        return RankedPromptWorker(told, group)

    def _host(self, forwards: Forwards, space: PageSpace) -> HostParts:
        if self.shape.host is None:
            return HostParts()
        made = self._store(self.shape.host, forwards)
        store = StoredByAll(made.store, lambda: self.board.read(1, BoardField.SAVED))
        return HostParts(host_prefixes(made.layout, made.items, store, space), store)

    def _store(self, host: HostShape, forwards: Forwards) -> HostShare:
        pool = forwards.layout, forwards.runner.pool.storage
        return self._host_memory(host, pool, forwards.arriving.expect)

    def _rank_store(self, forwards: Forwards) -> RankStore:
        if self.shape.host is None:
            return NoHostCopies()
        self.rank_stores.append(self._store(self.shape.host, forwards).store)
        return self.rank_stores[-1]

    def _prefill_rank(self, group: OtherRanks, ranks: Ranks) -> PromptRankWork:
        # the slots of rank 0, which the copies of pages and states rely on
        served = self._load("prefill", ranks)
        snapshots = SnapshotBudget(self.shape.prefill_snapshots)
        served = replace(served, state=replace(served.state, snapshots=snapshots))
        forwards = self._prompt_forwards(served)
        pool = forwards.runner.pool
        group.pools.append(pool.storage)
        config, rows = served.config, self.shape.prefill_batch
        parts = prefill_node.assemble.Computation(
            forwards,
            AdjustmentRows.allocate(rows, config.vocab_size, pool.device),
            rotary_places(config.rope),
            Immediate,
            served.draft_shape.dtype_name,
        )
        step = prefill_node.assemble.prompt_step(parts)
        store, shard = self._rank_store(forwards), ranks.shard
        worker = PromptWorker(step, NoSending(), pool, Immediate, store)
        host = RankHost(store, partial(self.board.write, shard.rank))
        return PromptRankWork(worker, host, group.groups[shard.rank].check)
