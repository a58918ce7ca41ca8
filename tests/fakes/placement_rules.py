"""The rules of placement with the defaults of the cluster file."""

from __future__ import annotations

from common.config.schema import PlacementSection
from router.nodes.placement_rules import PlacementRules

_SECTION = PlacementSection()
DEFAULT_RULES = PlacementRules(
    block_tokens=_SECTION.block_tokens,
    index_bytes=_SECTION.index_mib << 20,
    prefix_ttl=_SECTION.prefix_ttl,
    max_imbalance_ms=_SECTION.max_imbalance_ms,
    session_ttl=_SECTION.session_ttl,
    session_ms=_SECTION.session_ms,
    busy_first_token_ms=_SECTION.busy_first_token_ms,
    busy_pool_share=_SECTION.busy_pool_share,
    local_tokens=0,
    uncached=frozenset(),
)
