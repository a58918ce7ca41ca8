"""Pairs of nodes with several ranks each: requests get the tokens that they get from nodes of one rank."""

from __future__ import annotations

import pytest

from tests.fakes.covering import every_value
from tests.fakes.ranked_cluster import RankedCluster

PROMPTS = [[(7 * n + 3 * i + i * i) % 610 + 20 for i in range(n)] for n in (5, 40)]
OUTPUT = 8
MARGIN = 1e-3  # between the two likeliest tokens, so that sums in another order choose the same


def serve(file: str, size: int) -> tuple[list[list[int]], float, tuple[int, int]]:
    """Return (token ids per request, smallest margin of a greedy choice, (accepted, drafted) tokens)."""
    with RankedCluster(file, size) as cluster:
        calls = [cluster.submit(prompt, OUTPUT, logprobs=2) for prompt in PROMPTS]
        seeded = [cluster.submit(prompt, OUTPUT, temperature=0.8, seed=11) for prompt in PROMPTS[:1]]
        cluster.run()
        margins = [
            token.logprob.top_logprobs[0] - token.logprob.top_logprobs[1]
            for call in calls
            for token in call.output
            if token.logprob is not None
        ]
        assert len(margins) == len(PROMPTS) * OUTPUT
        said = cluster.decode.link.counters
        counts = said.spec_accepted_tokens, said.spec_draft_tokens
        cluster.settle()
        return [call.ids for call in [*calls, *seeded]], min(margins), counts


@pytest.mark.parametrize(
    ("file", "size"),
    every_value(
        (
            *("local-eagle.yaml", "local-eagle3.yaml", "local-hybrid.yaml", "local-moe.yaml"),
            *("local-mtp.yaml", "local-standalone.yaml", "local-tools.yaml", "local-vision.yaml"),
        ),
        (2, 4),
    ),
)
def test_nodes_of_several_ranks_answer_as_nodes_of_one(file: str, size: int) -> None:
    """Prompts, pages, drafts and rounds, greedy and seeded; draft models are divided, too."""
    texts, margin, counts = serve(file, 1)
    assert margin > MARGIN, "near-ties: choose other prompts"
    assert 0 < counts[0] < counts[1], "drafts are verified"
    found, _, theirs = serve(file, size)
    assert found == texts
    assert theirs == counts
