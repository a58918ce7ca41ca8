"""Trees of EAGLE heads: the selection of nodes, and plain decoding's tokens for every shape."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.forward.batch import ForwardBatch
from common.engine.forward.draft_inputs import DraftInput, TreeVerifyInput
from common.engine.forward.draft_runner import DraftRunner
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from decode_node.speculative.drafters.eagle_tree import TreeGrowth
from decode_node.speculative.rounds import Round
from decode_node.speculative.tree import select_nodes, tree
from tests.fakes.covering import pairs
from tests.fakes.draft_models import branching, drafting, eager_branches
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, expect_retraction, prompt_of


def test_worked_example_of_the_selection() -> None:
    """With topk 2, 2 steps and 4 tokens, A (.6), B (.3) and A's child C (.30) are kept; D (.18), E (.27), F are not."""
    scores = torch.tensor([[0.6, 0.3, 0.30, 0.18, 0.27, 0.0]])
    kept, parents = select_nodes(scores, torch.tensor([[-1, 0, 1]]), topk=2, nodes=4)
    assert kept.tolist() == [[0, 1, 2]]
    assert parents.tolist() == [[-1, 0, 0, 1]]
    made = tree(torch.tensor([[9, 1, 2, 3]]), parents, 2)
    assert made.mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]


@settings(max_examples=200)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32), st.data())
def test_a_child_is_never_kept_without_its_parent(k: int, steps: int, seed: int, data: st.DataObject) -> None:
    """This includes tied scores: they are tenths."""
    rng = random.Random(seed)
    scores = [rng.randint(1, 10) / 10 for _ in range(k)]
    parents, beams = list(range(-1, k)), list(range(k))
    for level in range(1, steps):
        first = k + (level - 1) * k * k
        new = [scores[beam] * rng.choice((0.1, 0.5, 1.0)) for beam in beams for _ in range(k)]
        scores += new
        chosen = sorted(range(k * k), key=lambda i: -new[i])[:k]
        beams = [first + i for i in chosen]
        parents += beams
    nodes = data.draw(st.integers(2, len(scores) + 1))
    kept, above = select_nodes(torch.tensor([scores], dtype=torch.float64), torch.tensor([parents]), k, nodes)
    flats = [-1, *kept[0].tolist()]
    assert above[0, 0] == -1
    for node in range(1, nodes):
        parent = parents[flats[node] // k]
        assert flats[above[0, node]] == parent


class RecordedSteps(DraftRunner):
    """A draft runner without a model: it proposes tokens of equal probability and records where KV is written."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self.slots: list[int] = []

    def step(self, batch: ForwardBatch, hidden: Tensor) -> DraftInput:
        self.slots += batch.kv_slots.tolist()
        shape = (len(batch.logits_rows), self._topk)
        return DraftInput(torch.full(shape, 0.5), torch.arange(self._topk).repeat(shape[0], 1), hidden)


@pytest.mark.parametrize(
    ("form", "reserved"), [((1, 4, 5), 5), ((2, 2, 4), 4), ((3, 4, 8), 8), ((7, 8, 20), 48), ((4, 3, 5), 9)]
)
def test_a_round_reserves_all_slots_that_it_writes(form: tuple[int, int, int], reserved: int) -> None:
    """Levels that the draft has grown may need more slots than the tree that is kept of them."""
    steps, topk, nodes = form
    runner = RecordedSteps(topk)
    growth = TreeGrowth(runner, steps, topk, nodes)
    # Slot n of the request is slot n + 1 of the pool.
    table = torch.arange(1, 101, dtype=torch.int32)[None]
    one, index = torch.ones(1, dtype=torch.int64), torch.arange(100)
    batch = Round(one, one, one - 1, one - 1, table, 1, 100, index, index.to(torch.int32))
    start = DraftInput.zeros(1, topk, 2, torch.float32, torch.device("cpu"))
    growth.grow(batch, start, TreeVerifyInput.zeros(1, nodes, torch.device("cpu")))
    assert growth.lookahead_slots == reserved == max(nodes, *runner.slots, 0)


FORMS = ((1, 4, 5), (2, 2, 4), (3, 4, 8), (5, 3, 3), (7, 8, 20))  # steps, topk, nodes


@pytest.mark.parametrize(
    ("name", "form", "page_size", "completion"),
    pairs(("eagle3", "eagle"), FORMS, (1, 4, 64), (Immediate, Deferred)),
)
def test_tokens_equal_plain_decoding(
    name: str, form: tuple[int, int, int], page_size: int, completion: type[Completion]
) -> None:
    model, step = branching(name, *form)
    shape = Shape(draft=model, step=step, page_size=page_size, completion=completion, chunk_tokens=7)
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 9) for n in (1, 2, 17)]
        calls += [cluster.submit(prompt_of(n), 9, seed=n, **SAMPLED) for n in (3, 20)]
        calls += [cluster.submit(prompt_of(n), n) for n in (2, 3, 5)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_retraction(completion: type[Completion]) -> None:
    model, step = branching("eagle3", 3, 2, 6)
    shape = Shape(
        draft=model,
        step=step,
        page_size=4,
        decode_pool=96,
        reserved_tokens=4,
        max_running=4,
        completion=completion,
    )
    expect_retraction(shape)


def test_one_branch_is_the_chain_and_more_accept_more() -> None:
    """A tree with topk 1 drafts what the chain drafts, and a wide tree finds more of a random head's rare hits."""
    lengths = []
    made = (drafting("eagle3", 3), branching("eagle3", 3, 1, 4), branching("eagle3", 3, 8, 40))
    for model, step in made:
        with NodeCluster(Shape(draft=model, step=step)) as cluster:
            calls = [cluster.submit(prompt_of(n), 60) for n in (5, 19, 33)]
            cluster.run()
            expect_reference(*calls)
            lengths.append(cluster.decode.link.counters.avg_spec_accept_length)
            # The prefill node draws the first token.
            assert [call.tokens_of_rounds for call in calls] == [59] * len(calls)
            told = [call.rounds * (call.accept_length or 0) for call in calls]
            assert told == pytest.approx([59] * len(calls))
    assert lengths[0] == lengths[1]
    assert lengths[2] > lengths[0] + 0.05, lengths


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("steps", "topk", "nodes"), [(2, 2, 4), (3, 3, 9), (4, 2, 8), (4, 4, 5)])
@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_trees_equal_an_eager_recompute(name: str, steps: int, topk: int, nodes: int, page_size: int) -> None:
    """Every tree of every round has the paths of a search that runs the whole text again for each node."""
    seen: list[tuple[list[int], set[tuple[int, ...]]]] = []
    model, step = branching(name, steps, topk, nodes, seen)
    with NodeCluster(Shape(draft=model, step=step, page_size=page_size, chunk_tokens=7)) as cluster:
        calls = [cluster.submit(prompt_of(n), 12) for n in (2, 17)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    assert len(seen) > 15
    for text, paths in seen:
        assert paths == _eager_tree(name, text, steps, topk, nodes)


def _eager_tree(name: str, text: list[int], steps: int, topk: int, nodes: int) -> set[tuple[int, ...]]:
    beams: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    found: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(steps):
        grown = [
            (score * prob, (*path, token))
            for score, path in beams
            for prob, token in eager_branches(name, text, path, topk)
        ]
        found += grown
        beams = sorted(grown, key=lambda each: -each[0])[:topk]
    return {path for _, path in sorted(found, key=lambda each: -each[0])[: nodes - 1]}
