"""Drafts that are hardly ever right: a wrong head, or one that is fed what it was not trained on. Said once.

Tokens stay right, and nothing else tells: the node is only slower than without drafts. Known cases had 4 and 10 % of
the first drafts accepted where those heads have 75 and 45: https://github.com/vllm-project/vllm/pull/50170 and 43671.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.checkpoint.aux_layers import IDS, KEY
from common.checkpoint.draft_config import DraftConfig
from common.observability.logs import Log
from decode_node.accept_counters import AcceptCounters

ENOUGH = 4096  # rounds of one request with drafts, before they are judged
LEAST = 0.25  # of the first drafts are accepted where nothing is wrong


class DraftWatch(Protocol):
    """Looks at what came of drafts so far, after every step."""

    def look(self, counters: AcceptCounters) -> None: ...


class NoWatch:
    """Of a node without a draft model: n-grams are right as often as texts repeat."""

    def look(self, counters: AcceptCounters) -> None:
        pass


class FirstDraftWatch:
    """Warns when of `ENOUGH` first drafts too few were accepted. Later ones build on it, and say less."""

    def __init__(self, causes: str, log: Log) -> None:
        self._causes = causes
        self._log = log
        self._said = False

    def look(self, counters: AcceptCounters) -> None:
        if self._said or counters.drafts < ENOUGH:
            return
        accepted = counters.accepted_at[0] if counters.accepted_at else 0
        if accepted >= LEAST * counters.drafts:
            return
        self._said = True
        self._log.warning(
            "the first draft of a round is hardly ever accepted",
            rounds=counters.drafts,
            accepted=accepted,
            expected=f"at least {LEAST:.0%}",
            causes=self._causes,
            metrics="vllm:spec_decode_num_accepted_tokens_per_pos and vllm:spec_decode_num_drafts",
        )


def causes_of(path: Path, draft: DraftConfig) -> str:
    """Of few accepted drafts, likely ones first, and what to do."""
    causes = []
    if draft.aux_layers:
        causes.append(
            f"it reads the layers {', '.join(map(str, draft.aux_layers))} (boundaries, {draft.aux.source}), and was "
            f"trained on others: write eagle_config.{IDS}, and {KEY}: boundary or output, as in its training, into "
            f"{path / 'config.json'}"
        )
    causes.append(f"{path.name} was trained for another model, or another version of this one: take its own")
    causes.append(
        "texts or temperatures unlike those of its training: set speculation.algorithm to none for them"
    )
    return "; ".join(causes)
