"""The table of placement policies.

Adding one: a class or a function in router/nodes/placement.py, and a row here.
"""

from __future__ import annotations

# router.placement.prefill and .decode -> "module:attribute" from the cost function of a role to its PlacementPolicy
PLACEMENTS = {
    "round_robin": "router.nodes.placement:round_robin",
    "least_loaded": "router.nodes.placement:LeastLoaded",
    "power_of_two": "router.nodes.placement:PowerOfTwo",
    "cache_aware": "router.nodes.placement:CacheAware",
    "cache_events": "router.nodes.placement:CacheEvents",
}
