"""How much speculation gains: tokens per request and step, drafts verified and accepted."""

from __future__ import annotations

from decode_node.request import Emission


class AcceptCounters:
    """Totals since the node's start. Steps of requests that had ended already are not counted."""

    def __init__(self) -> None:
        self.steps = 0  # of one request each
        self.tokens = 0
        self.drafts = 0  # steps that verified at least one draft token
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_at: list[int] = []  # of each place in a row of drafts, how often it was accepted

    def count(self, emission: Emission) -> None:
        """Take in one request's share of a step, as it was drawn: before max_tokens and stops cut it."""
        self.steps += 1
        self.tokens += len(emission.tokens)
        if emission.drafted:
            self.drafts += 1
            self.draft_tokens += emission.drafted
            accepted = min(len(emission.tokens) - 1, emission.drafted)
            self.accepted_tokens += accepted
            self.accepted_at += [0] * (accepted - len(self.accepted_at))
            for place in range(accepted):
                self.accepted_at[place] += 1
            emission.request.rounds += 1
            emission.request.accepted += accepted

    @property
    def mean_length(self) -> float:
        """Tokens per target forward and request; exactly 1 without speculation."""
        return self.tokens / self.steps if self.steps else 1.0
