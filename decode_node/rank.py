"""Entry point and composition root of a rank of a decode node other than rank 0, which starts it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial

import msgspec
import zmq

from common.config.resolve_node import node_plan
from common.grammar.model_tokenizer import has_tokenizer
from common.messages.identity import rank_incarnation
from common.node.host_share import HostShare
from common.node.ranks.from_config import RankStart
from common.node.ranks.loop import SPIN_SECONDS
from common.node.ranks.member import BuiltRank, Member, run_rank
from common.node.ranks.rank_reports import rank_reports
from common.observability.logs import Log
from decode_node.assemble import device_worker
from decode_node.build import receiving_end, step_sizes
from decode_node.host_parts import host_fetches, host_share
from decode_node.loaded_rank import load_rank
from decode_node.peers import PeerConnections
from decode_node.rank_work import DecodeRankWork
from decode_node.ranked_host import RankFetches
from decode_node.receiving_end import ReceivingEnd
from kv_transfer.ranks.receiver_rank import ReceiverRank


class ReceivingService:
    """Receives the pages of this rank; implements `RankService`."""

    def __init__(
        self,
        rank: ReceiverRank,
        peers: PeerConnections,
        poller: zmq.Poller,
        end: ReceivingEnd,
        host: HostShare | None,
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._poller = poller
        self._end = end
        self._host = host

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return [socket for socket, _ in self._poller.sockets]

    def turn(self, completed: int, /) -> bool:
        return self._rank.turn()

    def close(self) -> None:
        if self._host is not None:
            self._host.store.close()
        self._rank.close()
        self._peers.close()
        self._end.close()


def build(member: Member, log: Log) -> BuiltRank:
    """Load this rank's share, and open its end of transfers."""
    start = msgspec.msgpack.decode(member.begin.work, type=RankStart)
    resolved, rank = start.resolved, member.begin.rank
    cluster = resolved.cluster
    plan = node_plan(cluster, "decode", start.name, resolved.model_path, resolved.draft_path)
    loaded = load_rank(
        plan.of_rank(rank), step_sizes(cluster, has_tokenizer(resolved.model_path)), member, log
    )
    end = receiving_end(resolved, plan, loaded.served, start.incarnation, rank)
    forwards = loaded.forwards(end.allocate)
    receiver = end.receiver(forwards.layout)
    loaded.capture(forwards, log)
    share = host_share(cluster.decode.host_mib << 20, forwards, member.exchange)
    rank_reports(loaded.served, plan.devices[rank], member.exchange)
    poller = zmq.Poller()
    incarnation = rank_incarnation(start.incarnation, rank)
    peers = PeerConnections(end.context, start.name, incarnation, receiver, poller, end.security)
    transfers = ReceiverRank(receiver, forwards.layout, peers, member.commands, member.events)
    show = partial(member.board.write, rank)
    host = RankFetches(host_fetches(share, time.monotonic), show)
    worker = device_worker(loaded.computation(forwards), time.monotonic, host)
    return BuiltRank(
        DecodeRankWork(worker, host, show, member.group.check),
        ReceivingService(transfers, peers, poller, end, share),
        SPIN_SECONDS if loaded.served.placement.device.type == "cuda" else 0.0,
    )


if __name__ == "__main__":
    run_rank(build, int(sys.argv[1]))
