"""The series of hundreds of nodes are written over many turns of the event loop, into one answer."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from prometheus_client.registry import Collector

from common.messages.identity import Role
from router.metrics import exposition
from router.metrics.exposition import OPENMETRICS, SAMPLES_PER_TURN
from router.metrics.router_metrics import NODES_AT_ONCE
from router.nodes.registry import Node
from tests.fakes.observing import router_metrics
from tests.fakes.turn_count import counting_turns
from tests.unit.router.metrics.test_router_metrics import node

NODES = 4 * NODES_AT_ONCE + 1
# rows of the largest family of one node
ROWS = 40


def nodes() -> list[Node]:
    roles: tuple[Role, ...] = ("prefill", "decode")
    return [node(role, f"{role}-{number}", total_pages=9) for role in roles for number in range(NODES)]


async def test_a_turn_writes_a_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nodes()
    metrics = router_metrics(lambda: made)
    write = generate_latest
    async with counting_turns() as count:
        # Until the counter has its turns.
        await asyncio.sleep(0)

        def noted(collector: Collector) -> bytes:
            count.note(sum(len(family.samples) for family in collector.collect()))
            return write(collector)

        monkeypatch.setattr(exposition, "generate_latest", noted)
        await metrics.render()
    assert count.total > 10 * SAMPLES_PER_TURN
    assert count.most <= SAMPLES_PER_TURN + ROWS * NODES_AT_ONCE


@pytest.mark.parametrize(("accept", "parse"), [("", text_families), (OPENMETRICS, openmetrics_families)])
async def test_every_family_is_whole(accept: str, parse: type) -> None:
    made = nodes()
    shown, _ = await router_metrics(lambda: made, 3).render(accept)
    families = list(parse(shown.decode()))
    assert max(Counter(family.name for family in families).values()) == 1
    by_name = {family.name.removesuffix("_total"): family for family in families}
    running = by_name["vllm:num_requests_running"].samples
    assert sorted(sample.labels["engine"] for sample in running) == sorted(each.name for each in made)
    refused = [sample for sample in by_name["tandem_refused_messages"].samples if sample.value == 3]
    assert [sample.labels["engine"] for sample in refused] == ["router"]
    weights = by_name["vllm:num_requests_waiting"].samples
    assert len(weights) == len(made) + 1


async def test_without_nodes_the_routers_own_series_are_there() -> None:
    shown, _ = await router_metrics(list, 3).render()
    assert b'tandem_refused_messages_total{engine="router",model_name="tiny",role="router"} 3.0' in shown
