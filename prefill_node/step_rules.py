"""How the forwards of a node are planned: what its draft reads and writes beside the chunk itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Follows from the speculative algorithm; a node without a draft model has the defaults."""

    lookahead: int = 0  # tokens after a chunk that its forward reads
    # Computed tokens before a chunk whose KV its forward may write again. Where there are any, the worker keeps hidden
    # states from chunk to chunk.
    rewrites: int = 0
