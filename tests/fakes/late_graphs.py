"""Captures graphs when a batch first needs them, because a test of ten turns needs few of a node's graphs.

Capture at start-up is tested in tests/unit/*/graphs, in tests/unit/speculative for its graphs, and by clusters of
real processes.
"""

from __future__ import annotations

from typing import Any

from common.engine.graphs.admission import BatchFacts, admit
from common.engine.graphs.graph_runner import GraphRunner
from common.engine.graphs.spec import GraphKey


def capture_late(graphs: GraphRunner[Any, Any]) -> None:
    """Choose graphs as if all had been captured: the first variant that serves the batch."""
    choose, made = graphs.choose, set[GraphKey]()

    def capture_and_choose(facts: BatchFacts) -> Any:
        shape = admit(graphs.spec, facts).shape
        if shape is not None and (key := GraphKey(shape, facts.variants[0])) not in made:
            made.add(key)
            row = graphs.capture_one(key)
            assert not row.error, row
        return choose(facts)

    graphs.choose = capture_and_choose  # type: ignore[method-assign]
