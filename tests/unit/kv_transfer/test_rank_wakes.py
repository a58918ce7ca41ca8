"""Reports of other ranks wake rank 0 of a decode node, which waits for descriptors while it is idle."""

from __future__ import annotations

import select

from common.ipc.ring import Ring, RingReader, RingWriter
from common.kv_cache.pool_spec import PoolSpec
from common.messages.wire import encode
from kv_transfer.events import PeerRefused
from kv_transfer.ranks.receiver_group import ReceiverGroup
from kv_transfer.ranks.receiver_messages import RankRefused
from tests.unit.kv_transfer.group_rig import RECORD_SLOTS, Nodes, Queue
from tests.unit.kv_transfer.shares import FAMILIES, TOKENS, whole_planes

SPEC = PoolSpec(TOKENS, FAMILIES["gqa"])


def test_a_report_makes_a_descriptor_readable_until_it_is_processed() -> None:
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
