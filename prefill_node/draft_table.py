"""The work of a prefill node in addition to the target, for each speculative algorithm."""

from __future__ import annotations

from common.named import named
from prefill_node.draft import BuiltDraft, DraftSetup

# speculation.algorithm -> "module:function" from DraftSetup to BuiltDraft
PREFILL_DRAFTS = {
    "none": "prefill_node.draft:no_draft",
    "ngram": "prefill_node.draft:no_draft",
    "eagle3": "prefill_node.draft:head_draft",
    "eagle": "prefill_node.draft:head_draft",
    "mtp": "prefill_node.mtp:module_draft",
    "standalone": "prefill_node.draft:model_draft",
}


def make_draft(algorithm: str, setup: DraftSetup) -> BuiltDraft:
    built = named(PREFILL_DRAFTS[algorithm])(setup)
    assert isinstance(built, BuiltDraft)
    return built
