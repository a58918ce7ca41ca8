"""Warns once about a draft model whose drafts are almost never accepted, for example a wrong or misconfigured head.

The tokens are correct even then, so nothing else reveals the fault: the node is only slower than without drafts. In
known cases 4 and 10 % of the first drafts were accepted, where correctly configured heads reach 75 and 45 %:
https://github.com/vllm-project/vllm/pull/50170 and 43671.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.checkpoint.aux_layers import IDS, KEY
from common.checkpoint.draft_config import DraftConfig
from common.observability.logs import Log
from decode_node.accept_counters import AcceptCounters

ENOUGH = 4096  # rounds with drafts, counted per request, before drafts are judged
MIN_ACCEPTED = 0.25  # share of first drafts that a working head gets accepted


class DraftWatch(Protocol):
    """Checks the accept counters after every step."""

    def check(self, counters: AcceptCounters) -> None: ...


class NoWatch:
    """Checks nothing: without a draft model, few accepted drafts are not a fault, because texts may not repeat."""

    def check(self, counters: AcceptCounters) -> None:
        pass


class FirstDraftWatch:
    """Warns if too few of the first `ENOUGH` first drafts were accepted. Later drafts depend on the first."""

    def __init__(self, causes: str, log: Log) -> None:
        self._causes = causes
        self._log = log
        self._warned = False

    def check(self, counters: AcceptCounters) -> None:
        if self._warned or counters.drafts < ENOUGH:
            return
        accepted = counters.accepted_at[0] if counters.accepted_at else 0
        if accepted >= MIN_ACCEPTED * counters.drafts:
            return
        self._warned = True
        self._log.warning(
            "the first draft of a round is almost never accepted",
            rounds=counters.drafts,
            accepted=accepted,
            expected=f"at least {MIN_ACCEPTED:.0%}",
            causes=self._causes,
            metrics="vllm:spec_decode_num_accepted_tokens_per_pos and vllm:spec_decode_num_drafts",
        )


def causes_of(path: Path, draft: DraftConfig) -> str:
    """List likely causes of rejected drafts, most likely first, with their remedies."""
    causes = []
    if draft.aux_layers and draft.mtp is None:
        causes.append(
            f"the draft reads layers {', '.join(map(str, draft.aux_layers))} (boundaries, {draft.aux.source}), but was "
            f"trained on others: set eagle_config.{IDS}, and {KEY}: boundary or output, as in its training, in "
            f"{path / 'config.json'}"
        )
    causes.append(f"{path.name} was trained for another model or version: use the draft of this model")
    causes.append(
        "the requests differ from its training texts or temperatures: set speculation.algorithm to none"
    )
    return "; ".join(causes)
