"""Log-probabilities of prompt tokens: equal to those of one forward over the prompt, however it is cut."""

from __future__ import annotations

import pytest
import torch

from common.messages.generation import PromptLogprob
from common.messages.router_inbox import FirstToken, PromptScores
from prefill_node import prompt_scores
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.scenarios import prompt_of
from tests.fakes.tiny_model import VOCAB, next_logits

TOP = 3
NAMED = (9, 4)  # tokens whose log-probabilities are wanted in each place


def computed(cluster: NodeCluster, *calls: Call) -> dict[int, list[PromptLogprob]]:
    """Turn the prefill node until the prompts are computed. Return their scores by room."""
    found: dict[int, list[PromptLogprob]] = {call.room: [] for call in calls}
    waiting = set(found)
    for _ in range(200):
        cluster.prefill.node.loop.turn()
        for message in cluster.prefill.link.taken():
            if isinstance(message, PromptScores):
                assert message.room in waiting, "scores are sent before the first token"
                assert message.start == len(found[message.room]) + 1
                found[message.room] += message.tokens
            elif isinstance(message, FirstToken):
                waiting.discard(message.room)
        if not waiting:
            return found
    raise AssertionError("the prompts were not computed")


def check(call: Call, scores: list[PromptLogprob], top: int) -> None:
    assert len(scores) == len(call.prompt) - 1
    for place, score in enumerate(scores, start=1):
        logprobs = next_logits(tuple(call.prompt[:place]))[0].log_softmax(-1)
        own = logprobs[call.prompt[place]]
        torch.testing.assert_close(torch.tensor(score.logprob), own, rtol=1e-4, atol=1e-5)
        assert score.rank == int((logprobs > own).sum()) + 1
        values, ids = logprobs.topk(top)
        assert list(score.top_ids) == ids.tolist()
        torch.testing.assert_close(torch.tensor(score.top_logprobs), values, rtol=1e-4, atol=1e-5)
        named = logprobs[list(call.sampling.logprob_ids)]
        torch.testing.assert_close(torch.tensor(score.chosen), named, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 1 << 20])
@pytest.mark.parametrize("graphs", ["breakable", "none"])
def test_scores_equal_those_of_one_forward(rows: int, graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 tokens, logits of `rows` rows at a time, beside a prompt without scores."""
    monkeypatch.setattr(prompt_scores, "LOGITS", rows * VOCAB)
    with NodeCluster(Shape(chunk_tokens=8, prompt_graphs=graphs)) as cluster:
        scored = [
            cluster.submit(
                prompt_of(n, n), 4, legs="p", prompt_logprobs=TOP, logprobs=0, logprob_ids=NAMED[: n % 3]
            )
            for n in (1, 2, 8, 21)
        ]
        other = cluster.submit(prompt_of(13, 5), 4, legs="p", logprobs=0, logprob_ids=NAMED)
        found = computed(cluster, *scored, other)
        for call in scored:
            check(call, found[call.room], TOP)
        assert found[other.room] == []
        for call in (*scored, other):
            cluster.abort(call)
        cluster.settle()


def test_a_scored_prompt_is_computed_whole_although_it_is_cached() -> None:
    with NodeCluster(Shape(chunk_tokens=8)) as cluster:
        prompt = prompt_of(30, 3)
        first = cluster.submit(prompt, 4)
        cluster.run()
        second = cluster.submit(prompt, 4, prompt_logprobs=0)
        cluster.run()
        assert second.ids == first.ids, "scoring changes no token"
        assert second.cached_tokens == 0
        third = cluster.submit(prompt, 4, legs="p", prompt_logprobs=0)
        check(third, computed(cluster, third)[third.room], 0)
        cluster.abort(third)
        cluster.settle()
