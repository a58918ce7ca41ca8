"""How much speculation gains: tokens per request and step, drafts verified and accepted.

Two lengths are kept. Verification accepts up to N tokens of a step; max_tokens, a stop token or a stop id may cut
the answer before the last of them, so fewer are emitted.
"""

from __future__ import annotations

from decode_node.request import Emission


class AcceptCounters:
    """Totals since the node's start. Steps of requests that had ended already are not counted."""

    def __init__(self) -> None:
        self.steps = 0  # of one request each
        self.verified_tokens = 0  # accepted by verification, with the one that the target adds
        self.emitted_tokens = 0  # of these, part of an answer
        self.drafts = 0  # steps that verified at least one draft token
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_at: list[int] = []  # of each place in a row of drafts, how often it was accepted

    def count(self, emission: Emission, emitted: int) -> None:
        """Add one request's share of a step, of which the first `emitted` tokens became part of the answer."""
        self.steps += 1
        self.verified_tokens += len(emission.tokens)
        self.emitted_tokens += emitted
        if emission.drafted:
            self.drafts += 1
            self.draft_tokens += emission.drafted
            accepted = min(len(emission.tokens) - 1, emission.drafted)
            self.accepted_tokens += accepted
            self.accepted_at += [0] * (accepted - len(self.accepted_at))
            for place in range(accepted):
                self.accepted_at[place] += 1
            emission.request.rounds += 1
            emission.request.emitted_in_rounds += emitted

    @property
    def mean_emitted(self) -> float:
        """Tokens of answers per target forward and request; exactly 1 without speculation."""
        return self.emitted_tokens / self.steps if self.steps else 1.0

    @property
    def mean_verified(self) -> float:
        """As `mean_emitted`, with the tokens that were accepted after an answer's end."""
        return self.verified_tokens / self.steps if self.steps else 1.0
