"""Serves requests by a cluster whose nodes are killed in turn, and tells what the nodes counted."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.check_families import shipped
from tests.cluster.constrained_answers import Answered, Config, PostedT, ask_all
from tests.cluster.harness import Client, RunningCluster
from tests.fakes.waiting import PATIENCE

SHOWN = ("steps", "retractions", "spec_forced_tokens", "spec_accepted_forced")
TREE = {"topk": 4, "draft_tokens": 16}
# A request may meet more kills here than in a cluster.
KILLS: Config = {"router": {"max_crashes": 0, "max_attempts": 10}}


def small_pool(tokens: int) -> Config:
    """Return the sections of a cluster whose decode nodes cannot hold all requests."""
    return {"kv": {"page_size": 4}, "decode": {"pool_tokens": tokens, "reserved_tokens": 0}}


def cluster_config(name: str, speculation: Config, sections: Config) -> Config:
    """Return the sections of deploy/clusters/local-NAME.yaml with other keys."""
    config = shipped(name)
    if speculation:
        config["speculation"] |= speculation
    for section, keys in sections.items():
        config.setdefault(section, {}).update(keys)
    return config


@dataclass
class NodeTotals:
    """What nodes counted: those that were killed up to their last reports."""

    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SHOWN, 0)))
    kills: Counter[str] = field(default_factory=Counter)  # per role
    hit: int = 0  # requests that the killed nodes had
    tokens: int = 0  # of decode nodes
    forwards: float = 0.0  # that these took, per request

    def add(self, node: Config) -> None:
        """Add the totals of a decode node whose counters have ended."""
        counters = node["counters"]
        self.counters.update({name: counters[name] for name in SHOWN})
        self.tokens += counters["generated_tokens"]
        self.forwards += counters["generated_tokens"] / counters["avg_spec_accept_length"]

    def shown(self) -> Config:
        return {
            **self.counters,
            "kills": dict(self.kills),
            "hit": self.hit,
            "accept_length": round(self.tokens / max(self.forwards, 1.0), 2),
        }


async def kill_in_turn(cluster: RunningCluster, client: Client, totals: NodeTotals) -> None:
    """Kill one node after the other while it has requests, and start it again, until cancelled."""
    for victim in itertools.cycle(("decode-0", "prefill-0", "decode-1", "prefill-1")):
        deadline = time.monotonic() + PATIENCE
        while not busy(node := await client.node(victim)):
            assert time.monotonic() < deadline, f"{victim} got no request"
            await asyncio.sleep(0.002)
        cluster.kill(victim)
        totals.kills[node["role"]] += 1
        totals.hit += node["assigned"]
        if node["role"] == "decode":
            totals.add(node)
        try:
            await client.gone(victim)
        finally:
            cluster.launch(victim)
        await cluster.wait_nodes()


def busy(node: Config) -> bool:
    """Return whether a node works on requests: the router tells what it has, a decode node what it runs."""
    return bool(node["assigned"] and (node["role"] == "prefill" or node["load"]["running"]))


async def serve(
    config: Config, nodes: int, kill: bool, asked: Sequence[PostedT], limit: float
) -> tuple[list[tuple[PostedT, Answered]], Config]:
    """Start a cluster, ask everything, and return the answers and what the nodes counted."""
    totals = NodeTotals()
    with tempfile.TemporaryDirectory() as directory:
        async with RunningCluster(Path(directory), nodes, nodes, config=config) as cluster:
            async with Client(cluster.url) as client:
                began = time.monotonic()
                killing = asyncio.create_task(kill_in_turn(cluster, client, totals)) if kill else None
                answers = await ask_all(client, asked, limit)
                ended = time.monotonic()
                if killing is not None:
                    if killing.done():
                        killing.result()
                    killing.cancel()
                    await asyncio.gather(killing, return_exceptions=True)
                    await cluster.wait_nodes()
                await client.wait_idle()
                info = await client.info()
    for node in info["nodes"]:
        if node["role"] == "decode":
            totals.add(node)
    seconds = round(ended - began, 1)  # for the reader: it decides nothing
    return answers, {"seconds": seconds, **totals.shown()}
