"""How ranks find each other, and that a node whose ranks contradict each other is refused with a sentence."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
import pytest

from common.errors import TransferFailed
from common.kv_cache.pool_spec import PoolSpec
from common.messages.identity import rank_incarnation, routing_id
from kv_transfer import messages
from kv_transfer.events import Arrived, PagesFree, PeerRefused, RoomFailed
from kv_transfer.messages import Hello
from tests.fakes.loopback import Fabric
from tests.unit.kv_transfer.group_rig import Nodes
from tests.unit.kv_transfer.rig import Clock, Decode, Prefill
from tests.unit.kv_transfer.shares import DST, FAMILIES, TOKENS, layout, whole_planes

SPEC = PoolSpec(TOKENS, FAMILIES["gqa"])


def nodes_of(sizes: tuple[int, int]) -> Nodes:
    return Nodes(SPEC, sizes, "loopback", whole_planes(SPEC, True, 1))


def test_incarnations_of_ranks_follow_from_the_nodes() -> None:
    node = secrets.token_hex(16)
    ranks = [rank_incarnation(node, rank) for rank in range(64)]
    assert ranks[0] == node
    assert len(set(ranks)) == 64
    assert all(len(bytes.fromhex(each)) == 16 for each in ranks)


def test_rank_0_is_the_only_one_that_has_to_be_named() -> None:
    """With four prefill ranks and one decode rank, the Welcome of rank 0 names the three others."""
    nodes = nodes_of((4, 1))
    assert nodes.decode.sockets[0].connected == {nodes.prefill.leader}
    nodes.decode.open(1)  # before the Welcome
    nodes.turns(4)
    assert nodes.decode.sockets[0].connected == {rank.incarnation for rank in nodes.prefill.ranks}
    nodes.prefill.expect(1, nodes.decode.leader)
    nodes.turns()
    assert nodes.decode_count(Arrived) == 1
    nodes.close()


def lie(
    change: Callable[[messages.Welcome], messages.Welcome], sizes: tuple[int, int] = (2, 1), rank: int = 0
) -> str:
    """Change the Welcome of one prefill rank; return why rank 0 of the decode node refuses it."""
    nodes = nodes_of(sizes)
    prefill = nodes.prefill.ranks[rank]
    identity = routing_id("decode-0", nodes.decode.leader, prefill.incarnation).encode()

    def altered(who: str, frame: bytes) -> None:
        _, message = messages.decode_for_receiver(frame)
        if isinstance(message, messages.Welcome):
            frame = messages.encode(change(message), who)
        nodes.decode.sockets[0].inbox.append((prefill.incarnation, frame))

    nodes.decode.open(1)
    for _ in range(10):
        if identity in prefill.clients:
            prefill.clients[identity] = altered
        nodes.turn()
    assert nodes.decode_count(RoomFailed) == nodes.decode_count(PagesFree) == 1
    refused = [event for event in nodes.decode.events if isinstance(event, PeerRefused)]
    assert [event.incarnation for event in refused] == [prefill.incarnation]
    nodes.close()
    return refused[0].reason


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (("mem://0",), "has 2 ranks and names 1 addresses, 1 of them different"),
        (("mem://0", "mem://0"), "has 2 ranks and names 2 addresses, 1 of them different"),
        (("mem://0", "mem://1", "mem://2"), "has 2 ranks and names 3 addresses, 3 of them different"),
    ],
    ids=["missing", "duplicated", "too many"],
)
def test_a_prefill_node_that_does_not_name_each_rank_once_is_refused(
    addresses: tuple[str, ...], words: str
) -> None:
    reason = lie(lambda welcome: msgspec.structs.replace(welcome, addresses=addresses))
    assert words in reason
    assert reason.startswith("prefill node prefill-0 ")


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 4)])
def test_a_prefill_rank_that_is_another_one_is_refused(rank: int, size: int) -> None:
    reason = lie(lambda welcome: msgspec.structs.replace(welcome, tp_rank=rank, tp_size=size), rank=1)
    assert (
        reason == f"prefill node prefill-0: rank {rank} of {size} answers for rank 1 of 2; restart that node"
    )


def test_a_percent_sign_in_the_name_of_a_refused_rank_is_shown() -> None:
    reason = lie(lambda welcome: msgspec.structs.replace(welcome, node="50%", tp_rank=0), rank=1)
    assert reason == "prefill node 50%: rank 0 of 2 answers for rank 1 of 2; restart that node"


def test_a_prefill_rank_that_answers_at_another_ranks_address_is_refused() -> None:
    nodes = nodes_of((2, 1))
    own = nodes.prefill.ranks[0].sender
    own.addresses = own.addresses[::-1]
    nodes.turns()
    (refused,) = nodes.decode.events
    assert isinstance(refused, PeerRefused)
    assert "another incarnation answers at its address" in refused.reason
    nodes.close()


def test_a_decode_group_needs_the_addresses_of_a_prefill_node() -> None:
    nodes = nodes_of((1, 2))
    nodes.prefill.ranks[0].sender.addresses = ()
    nodes.decode.open(1)
    nodes.turns()
    (failed, free) = nodes.decode.events
    assert isinstance(failed, RoomFailed)
    assert failed.code == TransferFailed.code
    assert failed.reason == "prefill node prefill-0 does not name the addresses of its ranks; update it"
    assert isinstance(free, PagesFree)
    nodes.close()


def two_ranks(fabric: Fabric, clock: Clock, node: str, name: str = "decode-0", size: int = 2) -> list[Decode]:
    return [
        Decode(
            clock,
            fabric.receiver(rank_incarnation(node, rank)),
            shape=layout(SPEC, False, rank, size),
            node=name,
            incarnation=node,
        )
        for rank in range(size)
    ]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fabric(clock: Clock) -> Fabric:
    return Fabric(clock)


@pytest.fixture
def prefill(clock: Clock, fabric: Fabric) -> Prefill:
    node = secrets.token_hex(16)
    return Prefill(clock, fabric.sender(node), incarnation=node, shape=layout(SPEC, True, 0, 1))


def refusal(decode: Decode) -> str:
    (refused,) = decode.poll()
    assert isinstance(refused, PeerRefused)
    return refused.reason


@pytest.mark.parametrize("leader", ["", "ab" * 16])
def test_a_decode_rank_of_another_node_is_refused(
    prefill: Prefill, fabric: Fabric, clock: Clock, leader: str
) -> None:
    decode = two_ranks(fabric, clock, secrets.token_hex(16))[1]

    def altered(frame: bytes) -> None:
        who, message = messages.decode_for_sender(frame)
        assert isinstance(message, Hello)
        lied = messages.encode(msgspec.structs.replace(message, leader=leader), who)
        prefill.sender.handle(decode.identity, lied)

    decode.connect(prefill, altered)
    reason = refusal(decode)
    assert reason.startswith(
        f"rank 1 of 2 of decode node decode-0 has incarnation {decode.incarnation}, which is no"
    )
    assert prefill.sender.counters.refused == {"ranks": 1}


def test_a_node_cannot_say_that_it_is_another_one(prefill: Prefill, fabric: Fabric, clock: Clock) -> None:
    """Keys prove the name in a routing id: a node that claims another's would replace it."""
    honest, liar = (two_ranks(fabric, clock, secrets.token_hex(16))[0] for _ in range(2))
    honest.connect(prefill)
    liar.identity = routing_id("decode-1", liar.incarnation).encode()
    liar.connect(prefill)
    assert refusal(liar).startswith("decode node decode-1 says that it is decode node decode-0")
    assert prefill.sender.counters.refused == {"name": 1}
    assert [peer.incarnation for peer in prefill.sender.peers.all()] == [honest.incarnation]


def test_a_node_cannot_say_that_it_is_a_rank_of_another_one(
    prefill: Prefill, fabric: Fabric, clock: Clock
) -> None:
    node = secrets.token_hex(16)
    leader, rank = two_ranks(fabric, clock, node)
    leader.connect(prefill)
    rank.identity = routing_id("decode-1", rank.incarnation).encode()

    def renamed(frame: bytes) -> None:
        who, message = messages.decode_for_sender(frame)
        assert isinstance(message, Hello)
        said = messages.encode(msgspec.structs.replace(message, node="decode-1"), who)
        prefill.sender.handle(rank.identity, said)

    rank.connect(prefill, renamed)
    assert refusal(rank) == (
        f"rank 1 of 2 of decode node decode-1: {node} is another node; start all ranks of a node together"
    )
    assert [peer.incarnation for peer in prefill.sender.peers.all()] == [leader.incarnation]


def test_decode_ranks_that_disagree_about_their_number_are_refused(
    prefill: Prefill, fabric: Fabric, clock: Clock
) -> None:
    node = secrets.token_hex(16)
    odd, first = two_ranks(fabric, clock, node, size=4)[3], two_ranks(fabric, clock, node)[0]
    first.connect(prefill)
    assert first.poll() == []
    odd.connect(prefill)
    assert refusal(odd) == (
        "rank 3 of 4 of decode node decode-0: another rank of the same node said that there are 2 ranks"
    )


def test_a_restarted_decode_node_replaces_all_ranks_of_its_predecessor(
    prefill: Prefill, fabric: Fabric, clock: Clock
) -> None:
    old = two_ranks(fabric, clock, secrets.token_hex(16))
    for decode in old:
        decode.connect(prefill)
    assert len(prefill.sender.peers.all()) == 2
    fresh = two_ranks(fabric, clock, secrets.token_hex(16), size=1)[0]
    fresh.connect(prefill)
    assert [peer.incarnation for peer in prefill.sender.peers.all()] == [fresh.incarnation]
    for decode in old:  # a late Hello does not bring them back
        decode.poll()
        decode.connect(prefill)
        assert "was replaced by" in refusal(decode)


def test_another_decode_node_does_not_replace_ranks(prefill: Prefill, fabric: Fabric, clock: Clock) -> None:
    for name in ("decode-0", "decode-1"):
        for decode in two_ranks(fabric, clock, secrets.token_hex(16), name):
            decode.connect(prefill)
            decode.connect(prefill)
    assert len(prefill.sender.peers.all()) == 4


def test_slots_of_a_later_rank_wait_for_its_part(prefill: Prefill, fabric: Fabric, clock: Clock) -> None:
    """The room names rank 0 of the decode node; the part of rank 1 appears whichever rank grants first."""
    decodes = two_ranks(fabric, clock, secrets.token_hex(16))
    for decode in decodes:
        decode.connect(prefill)
    prefill.sender.expect(1, decodes=(decodes[0].incarnation,))
    decodes[1].pump()
    decodes[1].receiver.open(1, [prefill.incarnation], DST, 0)
    assert prefill.poll() == []
    decodes[0].pump()
    decodes[0].receiver.open(1, [prefill.incarnation], DST, 0)
    assert len(prefill.poll()) == 1
    granted = prefill.sender.slots(1)
    assert granted is not None
    assert granted.incarnation == decodes[0].incarnation
