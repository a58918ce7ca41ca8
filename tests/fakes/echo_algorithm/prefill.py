"""The prefill node's part of the echo algorithm: none, because the drafts need no state."""

from __future__ import annotations

from prefill_node.draft import BuiltDraft, DraftSetup, NoDraft


def no_draft(setup: DraftSetup) -> BuiltDraft:
    return BuiltDraft(NoDraft())
