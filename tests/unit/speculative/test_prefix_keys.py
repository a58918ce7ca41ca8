"""Which tokens a cached page depends on, by the node's draft: KV of an EAGLE head depends on the next token too.

This is tested for every algorithm, with the nodes' own page bookkeeping.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.checkpoint.draft_config import DraftConfig, lookahead_for, with_steps
from common.checkpoint.model_config import ModelConfig
from common.node.serving_model import ServingModel, page_space
from common.speculation.directory import load_draft_config
from tests.unit.checkpoint.test_draft_config import MODELS, TARGET

PAGE = 4
# algorithm, shipped draft, number of tokens after a position that its draft KV depends on
DRAFTS: tuple[tuple[str, str, int], ...] = (
    ("none", "", 0),
    ("ngram", "", 0),
    ("standalone", "tiny-standalone", 0),
    ("eagle", "tiny-eagle", 1),
    ("eagle3", "tiny-eagle3", 1),
    ("mtp", "tiny-mtp", 2),
)


def draft_of(algorithm: str, name: str) -> DraftConfig | None:
    if not name:
        return None
    made = load_draft_config(MODELS / name, algorithm, ModelConfig.load(TARGET))
    return with_steps(made, 2) if made.modules else made


@pytest.mark.parametrize(("algorithm", "name", "lookahead"), DRAFTS)
def test_how_far_draft_kv_looks_ahead(algorithm: str, name: str, lookahead: int) -> None:
    draft = draft_of(algorithm, name)
    assert (0 if draft is None else lookahead_for(draft)) == lookahead


@pytest.mark.parametrize(("algorithm", "name", "lookahead"), DRAFTS)
def test_a_page_is_found_only_where_all_its_tokens_agree(algorithm: str, name: str, lookahead: int) -> None:
    """Two prompts diverge at every place inside or after the second page: hits end before KV that differs."""
    draft = draft_of(algorithm, name)
    served: Any = SimpleNamespace(
        num_pages=33,
        request_slots=0,
        snapshot_slots=range(0),
        computes_prompts=True,
        page_size=PAGE,
        config=ModelConfig.load(TARGET),
        draft=None if draft is None else SimpleNamespace(config=draft),
    )
    first = list(range(10, 10 + 3 * PAGE))
    for shared in range(len(first) + 1):
        space = page_space(cast(ServingModel, served), prefix_cache=True)
        known = space.lease(space.keys(first), space.pages_for(len(first)), max_cached_tokens=len(first))
        assert known is not None
        known.commit(space.keys(first))
        known.release()
        other = first[:shared] + [99] * (len(first) + PAGE - shared)
        found = space.lease(space.keys(other), space.pages_for(len(other)), max_cached_tokens=len(other))
        assert found is not None
        assert found.cached_tokens == max(shared - lookahead, 0) // PAGE * PAGE, shared
