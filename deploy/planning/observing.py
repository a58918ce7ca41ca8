"""Makes observations from the answers of routers to /server_info and /metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from common.messages.identity import Role
from deploy.cluster_sample import Buckets, ClusterSample
from deploy.planning.decision import NodeSeen, Observation


class Observer:
    """Compares the readings of all routers with the previous ones. Returns None for the first readings."""

    def __init__(self, quantile: float, least_requests: int) -> None:
        """
        Args:
            quantile: of first tokens.
            least_requests: first tokens, or gaps, below which their time counts as not measured.
        """
        self._quantile = quantile
        self._least = least_requests
        self._before: dict[str, ClusterSample] = {}

    def observe(
        self, samples: Mapping[str, ClusterSample], replicas: Mapping[Role, int]
    ) -> Observation | None:
        """Return the observation of an interval. `samples`: by router, at least one; their nodes are the same."""
        before, self._before = self._before, dict(samples)
        known = [name for name in samples if name in before]
        if not known:
            return None
        firsts = _summed([samples[name].first_tokens.since(before[name].first_tokens) for name in known])
        # Every router has the series of all nodes.
        now, then = samples[known[0]], before[known[0]]
        prefills = [node for node in now.nodes if node["role"] == "prefill"]
        decodes = [node for node in now.nodes if node["role"] == "decode"]
        return Observation(
            at=now.at,
            nodes=tuple(_seen(node) for node in now.nodes),
            first_token=self._quantile_of(firsts),
            gap=self._mean_gap(now, then),
            queued=_mean([node["load"]["queued_ms"] / 1000 for node in prefills]),
            busy=_busy(prefills, then, now.at - then.at),
            running=_mean([node["load"]["running"] for node in decodes]),
            pool_use=_mean([_used(node["load"]) for node in decodes]),
            waiting_for_room=sum(sample.waiting_for_room for sample in samples.values()),
            replicas=dict(replicas),
        )

    def _quantile_of(self, buckets: Buckets) -> float | None:
        found = buckets.quantile(self._quantile)
        return None if buckets.total < self._least or math.isnan(found) else found

    def _mean_gap(self, now: ClusterSample, then: ClusterSample) -> float | None:
        """Return the mean: the buckets of the histogram are too wide to tell how near a gap is to its target."""
        count = now.gaps.total - then.gaps.total
        seconds = now.gap_seconds - then.gap_seconds
        # A node that has restarted counts from 0.
        return seconds / count if count >= self._least and seconds >= 0 else None


def _summed(parts: Sequence[Buckets]) -> Buckets:
    counts: dict[float, float] = {}
    for part in parts:
        for bound, count in part.counts.items():
            counts[bound] = counts.get(bound, 0.0) + count
    return Buckets(counts)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _seen(node: Mapping[str, Any]) -> NodeSeen:
    load = node["load"]
    requests = load["queued"] + load["running"] + load["transferring"]
    return NodeSeen(node["name"], node["role"], node["state"] == "up", node.get("movable", False), requests)


def _used(load: Mapping[str, Any]) -> float:
    """Return the share of a pool that generated requests hold: the others have set theirs aside and wait for prompts.

    What is only cached can be had.
    """
    total, running = int(load["total_pages"]), int(load["running"])
    if not total or not running:
        return 0.0
    held = 1.0 - (int(load["free_pages"]) + int(load["cached_pages"])) / total
    return held * running / (running + int(load["transferring"]))


def _busy(prefills: Sequence[Mapping[str, Any]], then: ClusterSample, seconds: float) -> float | None:
    """Return the mean share of time in forwards; None where nodes do not measure them."""
    before = {
        node["name"]: node["counters"]["forward_seconds"] for node in then.nodes if node["role"] == "prefill"
    }
    measured = [node for node in prefills if node["counters"]["forward_seconds"] > 0.0]
    gained = [node["counters"]["forward_seconds"] - before.get(node["name"], math.inf) for node in measured]
    if seconds <= 0 or not gained or min(gained) < 0:
        return None
    return min(fmean(gained) / seconds, 1.0)
