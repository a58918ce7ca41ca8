"""A decode node drains under a backlog: it waits for the prompts that have begun, and for no others."""

from __future__ import annotations

from common.messages.node_inbox import PeerDraining
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of


def test_prompts_that_have_not_begun_leave_a_decode_node_that_drains() -> None:
    with NodeCluster(Shape(decodes=2, prefill_batch=1, routers=2), resubmit=False) as cluster:
        begun = cluster.submit(prompt_of(200), 6)
        waiting = [cluster.submit(prompt_of(200, seed), 6) for seed in range(1, 4)]
        elsewhere = cluster.submit(prompt_of(200, 5), 6, decode=1)
        others = cluster.submit(prompt_of(200, 6), 6, router=1)
        cluster.turn(2)
        assert [each.room for each in cluster.prefill.node.queues.computing.values()] == [begun.room]
        assert cluster.decode.space.leased_pages > 0
        cluster.prefill.link.deliver(PeerDraining(incarnation=cluster.decode.ref.incarnation))
        cluster.run(lambda: all(call.error is not None for call in waiting))
        assert {call.error.code for call in waiting if call.error is not None} == {"moved"}
        assert not any(call.error for call in (begun, elsewhere, others)), (
            "only what is the router's and waits"
        )
        for call in waiting:
            cluster.place(call, decode=1)
        cluster.run()
        for call in (begun, *waiting, elsewhere, others):
            expect_reference(call)
        assert [call.attempts for call in (begun, *waiting)] == [1, 2, 2, 2]
        cluster.settle()
