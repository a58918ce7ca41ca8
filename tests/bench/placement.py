"""The router's cost of choosing a pair of nodes, in microseconds per request, without any other part of a request.

    python -m tests.bench.placement [--nodes 1 8 32] [--requests 0 16]

For each number of nodes per role and of requests in flight per node: both policies with healthy nodes; then with a bad
pair, a node in slow start and an outlier, which is the most expensive case.
"""

from __future__ import annotations

import argparse
import time
from random import Random

from common.messages.identity import ROLES, NodeLoad, NodeRef, Role
from common.messages.router_inbox import Register
from common.observability.logs import Log
from common.placements import PLACEMENTS
from router.nodes.health import NodeHealth
from router.nodes.placement import decode_cost, make_policy, prefill_cost
from router.nodes.placer import Placer
from router.nodes.registry import NodeRegistry
from tests.fakes.placement_rules import DEFAULT_RULES

ROUNDS = 15
CHOICES = 400


def fleet(nodes: int, requests: int) -> tuple[NodeRegistry, NodeHealth]:
    """Return nodes that are past their slow start."""
    registry = NodeRegistry("f", 3.0, 3.0, time.monotonic, Log("bench"), lambda node, why: None, lambda: None)
    for role in ROLES:
        for number in range(nodes):
            registry.register(_register(role, number))
    for node in registry:
        node.since -= 100.0
        node.load = NodeLoad(running=requests, free_pages=900, total_pages=1000)
        for room in range(requests):
            node.rooms.add(room, 100 * (node.role == "prefill"))
    return registry, NodeHealth(10.0, time.monotonic)


def disturb(registry: NodeRegistry, health: NodeHealth) -> None:
    prefills, decodes = ([node for node in registry if node.role == role] for role in ROLES)
    health.transfer_failed(prefills[0], decodes[0])
    prefills[-1].since = time.monotonic()
    for node in decodes:
        for _ in range(20):
            health.decoded(node, 5.0 if node is decodes[-1] else 0.5, 100)


def microseconds(registry: NodeRegistry, health: NodeHealth, policy: str) -> float:
    """Return the CPU time of one choice: the minimum of all rounds, because other processes share this machine."""
    costs = {"prefill": prefill_cost, "decode": decode_cost}
    policies = {role: make_policy(policy, costs[role]) for role in ROLES}
    placer = Placer(registry, policies, health, Random(1), DEFAULT_RULES)
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CHOICES):
            placer.choose()
        times.append((time.process_time() - start) / CHOICES * 1e6)
    return min(times)


def _register(role: Role, number: int) -> Register:
    name = f"{role}-{number}"
    return Register(
        node=NodeRef(name=name, role=role, incarnation=f"{name} 0123456789abcdef"),
        host="h",
        pid=1,
        model_fingerprint="f",
        max_model_len=100,
        page_size=16,
        total_pages=1000,
        effective_config={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, nargs="+", default=[0, 16])
    options = parser.parse_args()
    print(f"{'nodes':>9} {'requests':>8} {'policy':>12} {'healthy us':>10} {'disturbed us':>12}")
    for nodes in options.nodes:
        for requests in options.requests:
            for policy in PLACEMENTS:
                registry, health = fleet(nodes, requests)
                healthy = microseconds(registry, health, policy)
                disturb(registry, health)
                disturbed = microseconds(registry, health, policy)
                size = f"{nodes}x{nodes}"
                print(f"{size:>9} {requests:>8} {policy:>12} {healthy:>10.1f} {disturbed:>12.1f}")


if __name__ == "__main__":
    main()
