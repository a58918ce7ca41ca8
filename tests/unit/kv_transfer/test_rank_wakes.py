"""Reports of other ranks wake rank 0, which waits for descriptors while it is idle."""

from __future__ import annotations

import select

from common.ipc.ring import Ring, RingReader, RingWriter
from common.kv_cache.pool_spec import PoolSpec
from common.messages.wire import encode
from kv_transfer.events import PeerRefused, SlotsGranted
from kv_transfer.ranks.receiver_group import ReceiverGroup
from kv_transfer.ranks.receiver_messages import RankRefused
from kv_transfer.ranks.sender_group import SenderGroup
from kv_transfer.ranks.sender_messages import RankGranted
from tests.unit.kv_transfer.group_rig import RECORD_SLOTS, Nodes, Queue
from tests.unit.kv_transfer.shares import FAMILIES, TOKENS, whole_planes

SPEC = PoolSpec(TOKENS, FAMILIES["gqa"])


def test_a_report_wakes_a_decode_node_until_it_is_processed() -> None:
    nodes = Nodes(SPEC, (1, 2), "loopback", whole_planes(SPEC, True, 1))
    ring = Ring.create(4096, 1)
    reports = RingReader(ring, 0, "reports", 0)
    layout = nodes.decode.pools[0][1]
    group = ReceiverGroup(nodes.decode.receivers[0], layout, RECORD_SLOTS, Queue(1), [reports])
    poller = select.poll()
    (descriptor,) = group.descriptors
    poller.register(descriptor, select.POLLIN)
    try:
        assert poller.poll(0) == []
        RingWriter(ring, "reports", [0]).send(encode(RankRefused("ab" * 16, "another model")), 1.0)
        assert poller.poll(0) == [(descriptor, select.POLLIN)]
        assert group.poll() == [PeerRefused("ab" * 16, "rank 1 of this node: another model")]
        assert poller.poll(0) == []
    finally:
        ring.close()
        nodes.close()


def test_a_grant_on_another_rank_wakes_a_prefill_node() -> None:
    """It waits for it without polling, also after the report was read by `slots` during a forward."""
    nodes = Nodes(SPEC, (2, 1), "loopback", whole_planes(SPEC, True, 1))
    ring = Ring.create(4096, 1)
    local, addresses = nodes.prefill.ranks[0].sender, nodes.prefill.addresses
    group = SenderGroup(local, addresses, Queue(1), [RingReader(ring, 0, "reports", 0)])
    (descriptor,) = group.descriptors
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    try:
        group.expect(1, None, (nodes.decode.leader,))
        nodes.decode.open(1)
        for _ in range(9):
            nodes.turns(1, skip=["p0", "p1"])
            nodes.prefill.ranks[0].listen()
        assert group.slots(1) is None
        assert group.poll() == []
        assert group.poll_interval is None
        assert poller.poll(0) == []
        RingWriter(ring, "reports", [0]).send(encode(RankGranted(1)), 1.0)
        assert poller.poll(0) == [(descriptor, select.POLLIN)]
        assert group.slots(1) is not None
        assert poller.poll(0) == []
        assert group.poll_interval == 0.0
        assert group.poll() == [SlotsGranted(1)]
        assert group.poll_interval is None
    finally:
        ring.close()
        nodes.close()
