"""Rules for planning forwards: the positions that the draft reads and writes outside the chunk itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Rules of the speculative algorithm. The defaults are for nodes without a draft model."""

    lookahead: int = 0  # number of tokens after a chunk that its forward reads
    # Computed tokens before a chunk whose KV its forward may rewrite. If this is not 0, the worker keeps hidden states
    # from chunk to chunk.
    rewrites: int = 0
