"""Draft trees and the acceptance of their tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.forward.draft_inputs import TreeVerifyInput
from decode_node.speculative.tree import replace_drafts, tree
from decode_node.speculative.verifier import ChainAcceptor, TreeAcceptor


def test_worked_example() -> None:
    """A and B are children of the root, and C is a child of A."""
    made = tree(torch.tensor([[9, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]), depth=2)
    assert made.depth.tolist() == [[0, 1, 1, 2]]
    assert made.mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]


def test_forced_tokens_replace_drafts_in_place() -> None:
    drafts = torch.tensor([[5, 6, 7], [8, 9, 10]])
    replace_drafts(drafts, torch.tensor([[-1, 0, -1], [3, -1, -1]]))
    assert drafts.tolist() == [[5, 0, 7], [3, 9, 10]]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw (parents, tokens): parents come first, siblings are distinct."""
    nodes = draw(st.integers(1, 10))
    parents, tokens = [-1], [0]
    for node in range(1, nodes):
        parent = draw(st.integers(0, node - 1))
        taken = {tokens[i] for i in range(1, node) if parents[i] == parent}
        tokens.append(draw(st.sampled_from([t for t in range(12) if t not in taken])))
        parents.append(parent)
    return parents, tokens


@settings(max_examples=200)
@given(trees(), st.data())
def test_closure_and_walk(shape: tuple[list[int], list[int]], data: st.DataObject) -> None:
    """Mask rows are closed under ancestors, and the walk follows the draws as a manual walk does."""
    parents, tokens = shape
    nodes = len(parents)
    drawn = data.draw(st.lists(st.integers(0, 11), min_size=nodes, max_size=nodes))
    made = tree(torch.tensor([tokens]), torch.tensor([parents]), depth=nodes)
    for node in range(nodes):
        up = [node]
        while parents[up[-1]] >= 0:
            up.append(parents[up[-1]])
        assert made.mask[0, node].nonzero()[:, 0].tolist() == sorted(up)
        assert made.depth[0, node] == len(up) - 1
    path = [0]
    while True:
        below = [n for n in range(1, nodes) if parents[n] == path[-1] and tokens[n] == drawn[path[-1]]]
        if not below:
            break
        path += below
    accepted = TreeAcceptor(nodes, nodes, ()).accept(made, torch.tensor([drawn]))
    assert accepted.drafts.tolist() == [len(path) - 1]
    assert accepted.path[0, : len(path)].tolist() == path


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_a_chain_is_a_tree(tokens: list[int], data: st.DataObject) -> None:
    drawn = torch.tensor([data.draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))])
    made = replace(TreeVerifyInput.zeros(1, len(tokens), torch.device("cpu")), tokens=torch.tensor([tokens]))
    parents = torch.arange(len(tokens))[None] - 1
    same = tree(made.tokens, parents, len(tokens))
    assert torch.equal(made.mask, same.mask)
    assert torch.equal(made.depth, same.depth)
    by_chain = ChainAcceptor().accept(made, drawn)
    by_tree = TreeAcceptor(len(tokens), len(tokens), ()).accept(same, drawn)
    assert torch.equal(by_chain.drafts, by_tree.drafts)
    count = int(by_chain.drafts) + 1
    assert torch.equal(by_chain.path[:, :count], by_tree.path[:, :count])
