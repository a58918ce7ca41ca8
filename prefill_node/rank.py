"""Entry point and composition root of a rank of a prefill node other than rank 0, which starts it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import msgspec
import torch
import zmq
from torch import Tensor

from common.config.resolve_node import node_plan
from common.engine.collectives.group import CollectiveGroup
from common.kv_cache.host_plan import HostCopies, NoHostCopies, RankStore
from common.kv_cache.layer_kinds import state_grid
from common.node.ranks.from_config import RankStart
from common.node.ranks.loop import SPIN_SECONDS
from common.node.ranks.member import BuiltRank, Member, run_rank
from common.node.ranks.rank_reports import rank_reports
from common.node.serving_model import ServingModel
from common.observability.logs import Log
from kv_transfer.ranks.sender_rank import SenderRank
from prefill_node.assemble import prompt_step
from prefill_node.build import compiled_bodies, open_sockets, prompt_sizes, sending_end
from prefill_node.forwards import Forwards
from prefill_node.host_parts import host_share
from prefill_node.loaded_rank import MakeStage, load_prompt_rank
from prefill_node.page_sending import ByChunk, PageSending, RankPageSending, page_sending
from prefill_node.peer_frames import take_peer_frames
from prefill_node.rank_work import PromptRankWork
from prefill_node.ranked_host import RankHost
from prefill_node.sending_end import SendingEnd, Sockets
from prefill_node.vision_stage import given_stage
from prefill_node.worker import DeviceWorker


class SendingService:
    """Sends the pages of this rank; implements `RankService`."""

    def __init__(
        self, rank: SenderRank, sending: PageSending, end: SendingEnd, sockets: Sockets, host: HostCopies
    ) -> None:
        """Send what `rank` is told. `sending` launches copies of pages of the running forward."""
        self._rank = rank
        self._sending = sending
        self._end = end
        self._sockets = sockets
        self._host = host

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._end.peers.socket,)

    def turn(self, completed: int, /) -> bool:
        moved = self._rank.turn(completed)
        if self._rank.ordered:
            self._sending.granted()
        return moved or self._rank.busy

    def close(self) -> None:
        self._host.close()
        self._rank.close()
        self._end.peers.close()
        self._sockets.close()


def build(member: Member, log: Log) -> BuiltRank:
    """Load this rank's share, and open its end of transfers."""
    start = msgspec.msgpack.decode(member.begin.work, type=RankStart)
    resolved, rank = start.resolved, member.begin.rank
    cluster = resolved.cluster
    sockets = open_sockets(resolved, start.name, rank)
    plan = node_plan(cluster, "prefill", start.name, resolved.model_path, resolved.draft_path)
    plan = plan.of_rank(rank)

    def stage_of(served: ServingModel) -> MakeStage:
        stage = given_stage(served.model, functools.partial(_take_rows, served, member.group))
        return lambda wanted: stage

    bodies = compiled_bodies(cluster.prefill.compiler, plan.device)
    loaded = load_prompt_rank(plan, prompt_sizes(cluster, plan), member, stage_of, bodies, log)
    forwards = loaded.forwards()
    end = sending_end(resolved, plan, loaded.served, forwards, sockets, start.incarnation, rank)
    computation = loaded.computation(forwards, loaded.capture(forwards, log))
    host = _host_store(cluster.prefill.host_mib << 20, loaded.served, forwards, member)
    member.exchange(end.peers.address.encode())
    rank_reports(loaded.served, plan.device, member.exchange)
    listen = functools.partial(take_peer_frames, end.peers, end.sender)
    transfers = SenderRank(end.sender, listen, ByChunk(end.sender).send, member.commands, member.events)
    step = prompt_step(computation)
    pool = forwards.runner.pool
    sending = RankPageSending(page_sending(end.sender, forwards.signalled, transfers.of_running), transfers)
    worker = DeviceWorker(step, sending, pool, computation.completion, host)
    return BuiltRank(
        PromptRankWork(
            worker, RankHost(host, functools.partial(member.board.write, rank)), member.group.check
        ),
        SendingService(transfers, sending, end, sockets, host),
        SPIN_SECONDS if loaded.served.placement.device.type == "cuda" else 0.0,
    )


def _host_store(nbytes: int, served: ServingModel, forwards: Forwards, member: Member) -> RankStore:
    """Allocate this rank's share of the host memory for cached prefixes, if there is any."""
    if not nbytes:
        return NoHostCopies()
    grid = state_grid(served.config, served.page_size)
    return host_share(nbytes, grid, forwards, member.exchange).store


def _take_rows(served: ServingModel, group: CollectiveGroup, length: int) -> Tensor:
    """Return the rows [length, H] of an image, which rank 0 gives."""
    placement = served.placement
    room = torch.empty(length, served.config.hidden_size, dtype=placement.dtype, device=placement.device)
    return group.broadcast(room, 0)


if __name__ == "__main__":
    run_rank(build, int(sys.argv[1]))
