"""Transfers between nodes of all sizes through the objects that stand for all ranks of a node.

The mini nodes of group_rig use the same calls as real ones: rank 0 decides, the other ranks follow.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.errors import (
    ChecksumFailed,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    RequestError,
    TransferFailed,
    Unavailable,
)
from common.kv_cache.pool_spec import PoolSpec
from common.messages.identity import NodeRef, rank_incarnation
from common.messages.wire import encode
from kv_transfer import messages
from kv_transfer.events import (
    Arrived,
    Delivered,
    PagesFree,
    PeerRefused,
    RoomFailed,
    SlotsGranted,
    TransferLost,
)
from kv_transfer.heartbeats import MIN_ANNOUNCED_SECONDS
from kv_transfer.ranks.receiver_messages import RankArrived
from kv_transfer.ranks.sender_messages import RankDelivered
from tests.fakes import covering
from tests.fakes.loopback import Fault
from tests.unit.kv_transfer.group_rig import RECORD, RECORD_SLOTS, Nodes
from tests.unit.kv_transfer.rig import LIMITS
from tests.unit.kv_transfer.shares import DST, FAMILIES, PAIRS, SRC, TOKENS, expect_shares, whole_planes

RANKED = [pair for pair in PAIRS if pair != (1, 1)]


def names(pairs: list[tuple[int, int]]) -> list[str]:
    return [f"{a}to{b}" for a, b in pairs]


def make(family: str, sizes: tuple[int, int], transport: str = "loopback") -> Nodes:
    spec = PoolSpec(TOKENS, FAMILIES[family])
    source, before = whole_planes(spec, True, 1), whole_planes(spec, False, 2)
    return Nodes(spec, sizes, transport, source, before=before)


def begin(nodes: Nodes, room: int = 1) -> None:
    nodes.prefill.expect(room, nodes.decode.leader)
    nodes.decode.open(room)


def expect_pages(nodes: Nodes, family: str, sent: bool = True) -> None:
    spec = PoolSpec(TOKENS, FAMILIES[family])
    expect_shares(nodes.decode.pools, whole_planes(spec, True, 1), whole_planes(spec, False, 2), sent)


@pytest.mark.parametrize(
    ("transport", "family", "sizes"),
    covering.pairs(("loopback", "shm", "tcp"), ("state", "replicated"), PAIRS),
    ids=str,
)
def test_every_rank_ends_with_its_share(transport: str, family: str, sizes: tuple[int, int]) -> None:
    nodes = make(family, sizes, transport)
    try:
        begin(nodes)
        nodes.until(lambda: bool(nodes.prefill_count(Delivered) and nodes.decode_count(Arrived)))
        nodes.until(nodes.holds_nothing)
        expect_pages(nodes, family)
        (arrived,) = nodes.decode.events
        assert isinstance(arrived, Arrived)
        record = arrived.record
        assert (record.first_token, record.draft_topk_ids) == (RECORD.first_token, RECORD.draft_topk_ids)
        assert nodes.prefill.events == [SlotsGranted(1), Delivered(1)]
    finally:
        nodes.close()


@pytest.fixture(params=RANKED, ids=names(RANKED))
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = make("state", request.param)
    yield made
    made.close()


def ranks_of(nodes: Nodes) -> list[str]:
    prefill, decode = len(nodes.prefill.ranks), len(nodes.decode.receivers)
    return [f"p{rank}" for rank in range(prefill)] + [f"d{rank}" for rank in range(decode)]


def test_the_order_in_which_prompt_and_reservation_come_does_not_matter(nodes: Nodes) -> None:
    nodes.decode.open(1)
    nodes.turns()
    assert not nodes.decode.events
    nodes.prefill.expect(1, nodes.decode.leader)
    nodes.turns()
    nodes.prefill.expect(2, nodes.decode.leader)
    nodes.turns()
    nodes.decode.open(2)
    nodes.turns()
    assert (nodes.decode_count(Arrived), nodes.prefill_count(Delivered)) == (2, 2)
    assert nodes.holds_nothing()


def test_a_rank_that_lags_only_delays_the_request(nodes: Nodes) -> None:
    for slow in ranks_of(nodes):
        room = 1 + ranks_of(nodes).index(slow)
        arrived, delivered = nodes.decode_count(Arrived), nodes.prefill_count(Delivered)
        begin(nodes, room)
        nodes.turns(skip=[slow])
        assert (nodes.decode_count(Arrived), nodes.prefill_count(Delivered)) <= (arrived, delivered + 1)
        nodes.turns()
        assert (nodes.decode_count(Arrived), nodes.prefill_count(Delivered)) == (arrived + 1, delivered + 1)
    assert nodes.holds_nothing()
    expect_pages(nodes, "state")


def test_pages_leave_a_rank_only_when_its_own_plan_is_complete(nodes: Nodes) -> None:
    """Rank 0 has completed plan 3 and sends its part; the others have not, and wait."""
    nodes.prefill.after, nodes.prefill.completed[0] = 3, 3
    begin(nodes)
    nodes.turns()
    alone = len(nodes.prefill.ranks) == 1
    assert nodes.decode_count(Arrived) == alone
    for rank in range(1, len(nodes.prefill.ranks)):
        assert nodes.prefill.ranks[rank].sender.counters.pages_written == 0
        nodes.prefill.completed[rank] = 3
    nodes.turns()
    assert nodes.decode_count(Arrived) == 1
    expect_pages(nodes, "state")


STATIONS = range(9)  # turns after which the request is ended; it arrives after about six


@pytest.mark.parametrize("turns", STATIONS)
def test_an_abort_of_the_decode_node_frees_all_ranks(nodes: Nodes, turns: int) -> None:
    begin(nodes)
    nodes.turns(turns)
    arrived = nodes.decode_count(Arrived)
    nodes.decode.node.abort(1, "the client is gone")
    nodes.turns(20)
    if not turns:  # the prefill node knows only from the router
        nodes.prefill.node.cancel(1, "client_gone", "the client is gone")
        nodes.turns()
    assert nodes.decode_count(Arrived) == arrived
    assert nodes.decode_count(PagesFree) == 1 - arrived
    assert nodes.decode_count(RoomFailed) == 0
    assert nodes.prefill_count(Delivered) + nodes.prefill_count(TransferLost) == 1
    assert nodes.holds_nothing()
    reuse(nodes)


@pytest.mark.parametrize("turns", STATIONS)
def test_a_cancel_of_the_prefill_node_ends_all_ranks(nodes: Nodes, turns: int) -> None:
    begin(nodes)
    nodes.turns(turns)
    nodes.prefill.node.cancel(1, "finished", "the first token was the last")
    # It needs nothing from the decode node.
    nodes.turns(skip=[each for each in ranks_of(nodes) if each.startswith("d")])
    assert nodes.prefill_count(Delivered) + nodes.prefill_count(TransferLost) == 1
    nodes.turns(20)
    lost = [event for event in nodes.prefill.events if isinstance(event, TransferLost)]
    assert [event.code for event in lost] == ["finished"] * (1 - nodes.prefill_count(Delivered))
    if not nodes.decode_count(Arrived):
        failed = [event for event in nodes.decode.events if isinstance(event, RoomFailed)]
        assert [event.code for event in failed] == ["finished"]
        assert nodes.decode_count(PagesFree) == 1
    assert nodes.holds_nothing()
    reuse(nodes)


def reuse(nodes: Nodes) -> None:
    """Another request gets the same pages, and the same room on the decode node."""
    arrived = nodes.decode_count(Arrived)
    nodes.prefill.expect(2, nodes.decode.leader)
    nodes.decode.open(2)
    nodes.turns()
    assert nodes.decode_count(Arrived) == arrived + 1
    expect_pages(nodes, "state")
    assert nodes.holds_nothing()


@pytest.mark.parametrize("turns", STATIONS)
def test_the_death_of_any_prefill_rank_fails_the_request(nodes: Nodes, turns: int) -> None:
    assert nodes.fabric is not None
    begin(nodes)
    nodes.turns(turns)
    victim = nodes.prefill.ranks[-1]
    victim.dead = True
    nodes.fabric.kill(victim.incarnation)
    arrived = nodes.decode_count(Arrived)
    nodes.turns(20)
    if not arrived and not nodes.decode_count(Arrived):
        if nodes.decode_count(RoomFailed) == 0:  # it had never been connected to: the router tells
            nodes.decode.sockets[0].lost(nodes.prefill.leader)
        nodes.turns(20)
        assert nodes.decode_count(RoomFailed) == 1
        for rank in nodes.prefill.ranks:
            rank.dead = True  # the rest of the node follows
            nodes.fabric.kill(rank.incarnation)
        nodes.turns(20)
        assert nodes.decode_count(PagesFree) == 1
    assert nodes.decode.node.active == 0


@pytest.mark.parametrize("damage", ["corrupt", "drop", "fail"])
@pytest.mark.parametrize("hit", range(8))
def test_one_damaged_write_fails_the_request_on_all_ranks(nodes: Nodes, damage: str, hit: int) -> None:
    assert nodes.fabric is not None
    nodes.fabric.plan = lambda n: Fault(damage=damage if n == hit else "none")  # type: ignore[arg-type]
    begin(nodes)
    nodes.turns(20)
    writes = nodes.fabric.writes
    if hit >= writes:
        pytest.skip(f"only {writes} writes")
    assert nodes.decode_count(Arrived) == 0
    assert (nodes.decode_count(RoomFailed), nodes.decode_count(PagesFree)) == (1, 1)
    assert nodes.prefill_count(Delivered) + nodes.prefill_count(TransferLost) == 1
    assert nodes.holds_nothing()
    nodes.fabric.plan = lambda n: Fault()
    reuse(nodes)


@pytest.mark.parametrize("hit", [0, 1], ids=["rank 0", "rank 1"])
def test_a_checksum_that_differs_on_any_rank_is_counted(hit: int) -> None:
    nodes = make("gqa", (1, 2))
    assert nodes.fabric is not None
    nodes.fabric.plan = lambda n: Fault(damage="corrupt" if n == hit else "none")
    begin(nodes)
    nodes.turns()
    failed, _ = nodes.decode.events
    assert isinstance(failed, RoomFailed)
    assert failed.code == ChecksumFailed.code
    assert nodes.decode.node.counters.checksum_failures == 1
    assert nodes.decode.receivers[1].counters.checksum_failures == hit
    nodes.close()


def test_pages_stay_in_quarantine_until_no_rank_can_be_written(nodes: Nodes) -> None:
    assert nodes.fabric is not None
    stuck = 3 if len(nodes.prefill.ranks) * len(nodes.decode.receivers) > 1 else 1
    nodes.fabric.plan = lambda n: Fault(damage="stick" if n == stuck else "none")
    begin(nodes)
    nodes.turns()
    nodes.decode.node.abort(1, "enough")
    nodes.turns(20)
    assert nodes.decode_count(PagesFree) == 0
    assert nodes.decode.node.quarantined_pages == len(DST)
    with pytest.raises(InvalidRequest, match="room 1 is active already"):
        nodes.decode.open(1, [8], slot=1)
    nodes.fabric.unstick()
    nodes.turns(20)
    assert (nodes.decode_count(PagesFree), nodes.decode.node.quarantined_pages) == (1, 0)
    assert nodes.holds_nothing()


def test_the_loss_of_one_link_is_the_loss_of_the_request(nodes: Nodes) -> None:
    nodes.prefill.after = 1  # pages wait for a plan, except on rank 0
    begin(nodes)
    nodes.turns(3)
    receiver = nodes.decode.receivers[-1]
    part = next((part for part in receiver.rooms.parts() if part.active), None)
    if part is None:  # a single prefill rank has sent all
        assert len(nodes.prefill.ranks) == 1
        return
    receiver.link_lost(part.link.incarnation)
    nodes.turns(20)
    assert (nodes.decode_count(RoomFailed), nodes.decode_count(PagesFree)) == (1, 1)
    assert nodes.decode_count(Arrived) == 0
    assert nodes.holds_nothing()


def test_record_slots_of_all_ranks_bound_the_rooms() -> None:
    """Each rank receives from two prefill ranks, so every room takes two of its record slots."""
    nodes = make("gqa", (4, 2))
    nodes.turns(3)
    for room in range(RECORD_SLOTS // 2):
        nodes.decode.open(room, [])
    with pytest.raises(Overloaded, match="all 16 record slots are in use"):
        nodes.decode.open(99, [])
    nodes.close()


def test_a_room_that_was_opened_before_the_first_welcome_fails_if_its_ranks_take_too_many_slots() -> None:
    nodes = make("gqa", (4, 2))
    for room in range(RECORD_SLOTS // 2 + 1):
        nodes.decode.open(room, [])
    nodes.turns()
    (failed,) = [event for event in nodes.decode.events if isinstance(event, RoomFailed)]
    assert failed.code == Overloaded.code
    assert nodes.decode_count(PagesFree) == 1
    nodes.close()


def test_reports_of_unknown_rooms_are_defects(nodes: Nodes) -> None:
    if nodes.decode.reports:
        nodes.decode.reports[0].send(encode(RankArrived(5)), 1.0)
        with pytest.raises(InternalError, match="rank 1 reports RankArrived"):
            nodes.decode.node.poll()
    if nodes.prefill.reports:
        nodes.prefill.reports[0].send(encode(RankDelivered(5)), 1.0)
        with pytest.raises(InternalError, match="rank 1 reports RankDelivered"):
            nodes.prefill.node.poll()


def test_announced_work_reaches_the_peers_of_all_ranks(nodes: Nodes) -> None:
    begin(nodes)
    nodes.prefill.after = 1  # nothing is sent
    nodes.prefill.completed = [0] * len(nodes.prefill.ranks)
    nodes.turns(4)
    nodes.prefill.node.heartbeats.announce(30.0)
    nodes.decode.node.heartbeats.announce(20.0)
    nodes.turns(4)
    now = nodes.prefill.clock()
    links = [link for each in nodes.decode.receivers for link in each.links.values()]
    assert {link.busy_until for link in links} == {now + 30.0}
    peers = [peer for rank in nodes.prefill.ranks for peer in rank.sender.peers.all()]
    assert {peer.busy_until for peer in peers} == {now + 20.0}
    nodes.prefill.node.heartbeats.announce(0.0)  # it has ended early
    nodes.turns(4)
    assert {rank.sender.heartbeats.busy_ms for rank in nodes.prefill.ranks} == {0}


def test_work_that_no_peer_hears_of_costs_no_command_to_the_ranks() -> None:
    nodes = make("state", (2, 2))
    nodes.prefill.node.heartbeats.announce(MIN_ANNOUNCED_SECONDS / 2)
    nodes.decode.node.heartbeats.announce(MIN_ANNOUNCED_SECONDS / 2)
    assert not nodes.prefill.commands.readers[0].frames
    assert not nodes.decode.commands.readers[0].frames
    nodes.close()


def test_a_node_that_restarts_replaces_all_its_ranks() -> None:
    nodes = make("state", (2, 2))
    begin(nodes)
    nodes.turns()
    assert [len(rank.sender.peers.all()) for rank in nodes.prefill.ranks] == [1, 1]
    nodes.prefill.node.peer_lost(nodes.decode.leader)
    nodes.turns()
    assert [len(rank.sender.peers.all()) for rank in nodes.prefill.ranks] == [0, 0]
    assert nodes.prefill_count(Delivered) == 1
    nodes.close()


def test_ranks_find_a_lost_prefill_node_again(nodes: Nodes) -> None:
    begin(nodes)
    nodes.turns()
    nodes.decode.sockets[0].lost(nodes.prefill.leader)
    nodes.turns()
    nodes.decode.connect()
    begin(nodes, 2)
    nodes.turns()
    assert nodes.decode_count(Arrived) == 2
    assert nodes.decode_count(PeerRefused) == 0
    assert len(SRC) == len(DST)


def test_a_refused_rank_that_is_greeted_again_is_not_lost_a_second_time() -> None:
    nodes = make("state", (2, 2))
    begin(nodes)
    nodes.turns()
    prefill = rank_incarnation(nodes.prefill.leader, 1)
    nodes.decode.receivers[1].handle(prefill, messages.encode(messages.Refused("restart"), prefill))
    nodes.decode.turn(1)
    begin(nodes, 2)
    nodes.decode.turn(1)  # says Hello again before rank 0 reads of the refusal
    nodes.decode.turn(0)
    (refused,) = [event for event in nodes.decode.events if isinstance(event, PeerRefused)]
    nodes.decode.sockets[0].lost(refused.incarnation)
    nodes.turns()
    assert nodes.decode_count(RoomFailed) == 0
    assert nodes.decode_count(Arrived) == 2
    nodes.close()


def test_ranks_forget_a_prefill_node_whose_link_rank_0_has_forgotten() -> None:
    nodes = make("state", (2, 2))
    begin(nodes)
    nodes.turns()
    nodes.decode.node.link_lost(nodes.prefill.leader)
    nodes.turns()
    assert not nodes.decode.receivers[0].links
    assert nodes.decode.receivers[1].links
    nodes.decode.node.peer_lost(nodes.prefill.leader)
    nodes.turns()
    assert not nodes.decode.receivers[1].links
    nodes.close()


@pytest.mark.parametrize("error", [TransferFailed("no such address"), Unavailable("it is gone")])
def test_a_rank_that_cannot_open_a_room_fails_it_on_all(
    nodes: Nodes, error: RequestError, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nodes.decode.services:
        return
    nodes.turns(3)

    def refuse(peer: NodeRef) -> None:
        raise error

    monkeypatch.setattr(nodes.decode.sockets[1], "ensure", refuse)
    begin(nodes)
    nodes.turns()
    failed, free = nodes.decode.events
    assert isinstance(failed, RoomFailed)
    code = NodeLost.code if isinstance(error, Unavailable) else TransferFailed.code
    assert (failed.code, failed.reason) == (code, str(error))
    assert isinstance(free, PagesFree)
    assert nodes.prefill_count(TransferLost) == 1
    assert nodes.holds_nothing()
    monkeypatch.undo()
    nodes.decode.sockets[0].lost(nodes.prefill.leader)
    nodes.decode.connect()
    reuse(nodes)


def test_a_room_that_is_lost_before_its_grants_is_forgotten_on_all_ranks() -> None:
    """Rank 0 is granted, and the room is cancelled while the other rank waits for its grant."""
    nodes = make("state", (2, 2))
    begin(nodes)
    nodes.turns(8, skip=["d1"])
    assert nodes.prefill.ranks[1].sender.active == 1
    nodes.prefill.node.cancel(1, "cancelled", "cancelled")
    nodes.turns(4, skip=["d1"])
    assert nodes.prefill.events == [TransferLost(1, "cancelled", "cancelled")]
    nodes.turns()
    reuse(nodes)
    assert nodes.prefill.events[1:] == [SlotsGranted(2), Delivered(2)]
    nodes.close()


def test_a_decode_rank_that_never_grants_ends_the_request_on_both_sides() -> None:
    """Its process hangs; the other ranks wait no longer than for any grant."""
    nodes = make("state", (2, 2))
    begin(nodes)
    nodes.turns(8, skip=["d1"])
    nodes.prefill.clock.now += LIMITS.slots_timeout + 1
    nodes.turns(8, skip=["d1"])
    (lost,) = nodes.prefill.events
    assert isinstance(lost, TransferLost)
    assert "the decode node granted no slots" in lost.reason
    assert nodes.decode_count(RoomFailed) == 1
    nodes.turns()
    assert nodes.decode_count(PagesFree) == 1
    assert nodes.holds_nothing()
    nodes.close()
