"""The pages that nodes report as cached: those that only the prefix cache holds, so that a router counts on them."""

from __future__ import annotations

from common.messages.identity import NodeLoad
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import prompt_of

SHAPE = Shape(page_size=4)
PROMPT = 40  # tokens


def used(load: NodeLoad) -> int:
    return load.total_pages - load.free_pages - load.cached_pages


def test_pages_of_a_running_request_are_used_although_the_cache_has_them_too() -> None:
    with NodeCluster(SHAPE) as cluster:
        call = cluster.submit(prompt_of(PROMPT), 12)
        cluster.run(lambda: bool(cluster.prefill.link.load.transferring))
        assert used(cluster.prefill.link.load) >= PROMPT // SHAPE.page_size
        cluster.run(lambda: len(call.ids) > 3)
        assert cluster.decode.node.queues.running
        assert used(cluster.decode.link.load) >= PROMPT // SHAPE.page_size
        cluster.run()
        cluster.turn()
        for side in (cluster.prefill, cluster.decode):
            assert (used(side.link.load), side.link.load.cached_pages > 0) == (0, True)
        cluster.settle()
