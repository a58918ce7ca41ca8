"""Counters of speculative decoding: tokens per request and step, drafts verified and accepted.

Two lengths are counted. Verification accepts up to N tokens of a step; max_tokens, a stop token or a stop id may end
the answer before the last of them, so fewer are emitted.
"""

from __future__ import annotations

from decode_node.request import Emission


class AcceptCounters:
    """Totals since the start of the node. Steps of requests that had already ended are not counted."""

    def __init__(self) -> None:
        self.steps = 0  # each step of each request counts once
        self.verified_tokens = 0  # accepted by verification, including the token that the target adds
        self.emitted_tokens = 0  # those of `verified_tokens` that became part of an answer
        self.drafts = 0  # steps that verified at least one draft token
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.forced_tokens = 0  # forced and verified as drafts; not among `draft_tokens`
        self.accepted_forced = 0
        self.accepted_at: list[int] = []  # index in the draft chain -> number of accepted drafts

    def count(self, emission: Emission, emitted: int) -> None:
        """Count one request's part of a step, of which the first `emitted` tokens became part of the answer."""
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
        self.forced_tokens += emission.forced
        self.accepted_forced += min(len(emission.tokens) - 1, emission.forced)
        if emission.verified_drafts:
            emission.request.rounds += 1
            emission.request.emitted_in_rounds += emitted

    @property
    def mean_emitted(self) -> float:
        """Emitted tokens per target forward and request; exactly 1 without speculation and grammars."""
        return self.emitted_tokens / self.steps if self.steps else 1.0

    @property
    def mean_verified(self) -> float:
        """Verified tokens per target forward and request, including those accepted past the end of an answer."""
        return self.verified_tokens / self.steps if self.steps else 1.0
