"""Which prompt graphs of a prefill node have no breaks, where attention makes no decision on the host."""

from __future__ import annotations

import pytest

from common.engine.attention.prompt_attention import PromptAttention
from prefill_node.graphs import prompt_graphs
from tests.fakes.node_cluster import HostShape, NodeCluster, Shape
from tests.fakes.scenarios import expect_reference, prompt_of

FEW = 4  # tokens up to which no graph has breaks


@pytest.mark.parametrize(
    ("served", "broken"),
    [
        (Shape(prompt_graphs="breakable"), False),
        (Shape(prompt_graphs="breakable", layers=True), True),
        (Shape(prompt_graphs="breakable", page_size=8, host=HostShape(blocks=40, block_pages=2)), True),
    ],
)
def test_only_what_happens_between_layers_needs_breaks(
    served: Shape, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are sent or loaded layer by layer would otherwise wait for the whole forward."""
    monkeypatch.setattr(prompt_graphs, "UNBROKEN_TOKENS", FEW)
    monkeypatch.setattr(PromptAttention, "tokens_on_device", lambda self, heads, dtype, most: most)
    with NodeCluster(served) as cluster:
        shapes = cluster.prefill.forwards.target.forward.graphs.spec.shapes
        call = cluster.submit(prompt_of(29), 3)
        cluster.run()
        expect_reference(call)
        # Only graphs with breaks hold any number of requests.
        large = {shape.tokens: shape.requests == 0 for shape in shapes if shape.tokens > FEW}
        assert max(large) == 32
        assert set(large.values()) == {broken}
