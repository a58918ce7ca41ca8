"""Requests with a limit of reasoning tokens: the text of a reference that masks logits, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.generation import ThinkingLimit, TokenRules
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.covering import every_value
from tests.fakes.drafters import ngram
from tests.fakes.node_cluster import Call, MakeStep, NodeCluster, Shape, autoregressive, with_forced_tokens
from tests.fakes.scenarios import SAMPLED, expect_reference, lose_decode, prompt_of
from tests.fakes.tiny_grammar import GRAMMARS, tiny_compiler
from tests.fakes.tiny_model import VOCAB, reference

BEGIN, END = (40,), 33
# One token, and several, of which the last are also the first.
ENDS = (END,), (END, 7, END)
RANDOM: dict[str, Any] = {"temperature": 1.3}


def budget(
    tokens: int, spent: int | None = 0, begin: tuple[int, ...] = BEGIN, end: tuple[int, ...] = (END,)
) -> TokenRules:
    return TokenRules(thinking=ThinkingLimit(tokens, begin, end, spent))


def thinking(
    cluster: NodeCluster,
    length: int,
    tokens: int,
    max_tokens: int = 40,
    end: tuple[int, ...] = (END,),
    **more: Any,
) -> Call:
    return cluster.submit(prompt_of(length), max_tokens, token_rules=budget(tokens, end=end), **more)


def index(call: Call, end: tuple[int, ...]) -> int:
    """Return where the end of the reasoning begins in an answer."""
    return next(at for at in range(len(call.ids)) if tuple(call.ids[at : at + len(end)]) == end)


@pytest.mark.parametrize(
    ("step", "completion"),
    every_value((autoregressive, with_forced_tokens, ngram(3)), (Deferred, Immediate)),
)
def test_the_marker_follows_so_many_tokens(step: MakeStep, completion: type[Completion]) -> None:
    """From the first token on, which the prefill node draws; beside requests without a limit, and in one that ends."""
    with NodeCluster(Shape(step=step, completion=completion, max_running=8)) as cluster:
        cases = [
            *((tokens, ENDS[0]) for tokens in (0, 7)),
            *((tokens, ENDS[1]) for tokens in (0, 1, 2, 7, 30)),
        ]
        calls = [thinking(cluster, 9 + tokens, tokens, end=end) for tokens, end in cases]
        calls += [thinking(cluster, 9 + tokens, tokens, end=end, seed=5, **RANDOM) for tokens, end in cases]
        calls += [cluster.submit(prompt_of(9), 30), thinking(cluster, 9, 50, 20)]
        cluster.run()
        expect_reference(*calls)
        for call, (tokens, end) in zip(calls, (*cases, *cases)):
            assert index(call, end) <= tokens
        for end in ENDS:
            assert 7 in [index(call, end) for call, (_, other) in zip(calls, cases) if other == end], (
                "not every model ends its reasoning itself"
            )
        cluster.settle()


@pytest.mark.parametrize("width", [1, 3])
def test_reasoning_that_ends_by_itself_is_not_changed(width: int) -> None:
    """The end is what the model says anyway, and the begin what its answer begins with."""
    with NodeCluster(Shape()) as cluster:
        free = cluster.submit(prompt_of(9), 40)
        cluster.run()
        begin, end = tuple(free.ids[:width]), tuple(free.ids[12 : 12 + width])
        inside = index(free, end) - width
        assert begin != end
        calls = [
            cluster.submit(prompt_of(9), 40, token_rules=budget(tokens, None, begin, end))
            for tokens in (inside, 30, inside - 1)
        ]
        cluster.run()
        expect_reference(free, *calls)
        assert calls[0].ids == calls[1].ids == free.ids
        assert calls[2].ids != free.ids
        assert calls[2].ids[: inside + 2 * width - 1] == [*free.ids[: inside + width - 1], *end]
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_only_the_step_that_needs_a_mask_leaves_the_graph(completion: type[Completion]) -> None:
    with NodeCluster(Shape(completion=completion)) as cluster:
        calls = [thinking(cluster, 9, 8, 60), cluster.submit(prompt_of(12), 60)]
        cluster.run()
        expect_reference(*calls)
        assert calls[0].ids.index(END) == 8
        replays = cluster.decode.steps.graphs[0].forward.graphs.counters.replays
        by_variant: dict[str, int] = {}
        for key, count in replays.items():
            by_variant[key.variant] = by_variant.get(key.variant, 0) + count
        assert by_variant["logits"] == 1
        assert by_variant["greedy"] >= 58
        cluster.settle()


def test_beside_grammars_and_other_rules() -> None:
    """The grammar allows any text, so that the marker fits everywhere."""
    with NodeCluster(Shape(grammars=tiny_compiler(), max_running=6)) as cluster:
        rules = TokenRules(tuple(range(1, VOCAB, 2)), ((5,), (7, 9)), ThinkingLimit(6, BEGIN, ENDS[1], 0))
        calls = [cluster.submit(prompt_of(9), 40, token_rules=rules)]
        calls.append(cluster.submit(prompt_of(9), 40, token_rules=rules, seed=3, **RANDOM))
        calls.append(cluster.submit(prompt_of(12), 40, grammar=GRAMMARS["record"]))
        calls.append(thinking(cluster, 12, 9, min_tokens=30, stop_token_ids=(3, 4), logprobs=2))
        cluster.run()
        expect_reference(*calls)
        assert index(calls[0], ENDS[1]) <= 6
        cluster.settle()


@pytest.mark.parametrize(
    ("step", "completion"), every_value((autoregressive, with_forced_tokens), (Immediate, Deferred))
)
def test_retracted_requests_keep_their_count(step: MakeStep, completion: type[Completion]) -> None:
    shape = Shape(
        page_size=4, decode_pool=96, reserved_tokens=4, completion=completion, max_running=4, step=step
    )
    with NodeCluster(shape) as cluster:
        calls = [thinking(cluster, 10 + n, 20 + n, end=ENDS[n % 2], seed=n, **SAMPLED) for n in range(3)]
        calls += [thinking(cluster, 11 + n, 18 + 3 * n, end=ENDS[n]) for n in range(2)]
        calls.append(cluster.submit(prompt_of(12), 40))
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        cluster.settle()


@pytest.mark.parametrize(
    ("step", "said"), every_value((autoregressive, with_forced_tokens), (1, 7, 8, 9, 10, 12))
)
def test_another_node_goes_on_counting(step: MakeStep, said: int) -> None:
    """The lost node's tokens are at the end of the new prompt; the eighth of reasoning is the last one."""
    end = ENDS[said > 1]
    with NodeCluster(Shape(page_size=4, decodes=2, step=step)) as cluster:
        call = thinking(cluster, 17, 8, end=end, seed=5, **RANDOM)
        cluster.run(until=lambda: len(call.output) >= said)
        lose_decode(cluster, call)
        assert call.base >= said
        whole = reference(tuple(call.prompt), call.sampling)[0]
        assert tuple(whole[8 : 8 + len(end)]) == end


def test_tokens_of_the_prompt_count() -> None:
    with NodeCluster(Shape()) as cluster:
        calls = [cluster.submit(prompt_of(9), 20, token_rules=budget(6, spent)) for spent in (0, 2, 6, 50)]
        cluster.run()
        expect_reference(*calls)
        assert [call.ids.index(END) for call in calls] == [6, 4, 0, 0]
        cluster.settle()
