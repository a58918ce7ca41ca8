"""What a rank tells rank 0 while it starts."""

from __future__ import annotations

import contextlib
import socket

from common.engine.collectives.endpoints import open_endpoints
from common.errors import RankFailed
from common.ipc.ring import Ring
from common.node.ranks.board import Board
from common.node.ranks.member import REPORTS, Member
from common.node.ranks.messages import Begin, FromRank, Loading, RankRings, ToRank
from common.node.ranks.start_channel import StartChannel
from tests.fakes.waiting import PATIENCE


def test_a_rank_reports_what_it_loads_a_few_times() -> None:
    """Rank 0 need not read before it has loaded its own share."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    endpoints = open_endpoints(2)
    ring = Ring.create(1 << 16, 1)
    rings = RankRings(ring.spec, ring.spec, ring.spec)
    board = Board.create()
    begin = Begin(
        node="decode-0",
        rank=1,
        rings=rings,
        board=board.descriptor,
        collectives=endpoints[1],
        log_level="info",
        start_hang_timeout=0.0,
        work=b"",
    )
    channel: StartChannel[ToRank] = StartChannel(near, ToRank, peer=0)
    rank_0: StartChannel[FromRank] = StartChannel(far, FromRank, peer=1)
    member = Member(channel, begin)
    for total in (1000, 7):  # the target's, then the draft's
        for done in range(total + 1):
            member.report("loading", done, total)
    near.shutdown(socket.SHUT_WR)
    told: list[FromRank] = []
    with contextlib.suppress(RankFailed):
        while len(told) <= 2002:
            told.append(rank_0.receive(PATIENCE))
    assert told[0] == Loading(0, 1000)
    assert Loading(1000, 1000) in told
    assert told[-1] == Loading(7, 7)
    assert len(told) <= 2 * (REPORTS + 1)
    member.group.close()
    rank_0.close()
    channel.close()
    endpoints[0].close()
    ring.close()
    board.close()
