"""What placement is told about a request: of each attempt, the prompt with the answer so far."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from common.messages.generation import ImageSpan, SamplingParams
from router.dispatch.generation import GenerationRequest, PromptImage
from router.dispatch.in_flight import InFlight
from router.dispatch.pair_wait import PairWait
from router.dispatch.shared_prompt import PromptShare, shares
from router.metrics.placement_metrics import PlacementMetrics
from router.metrics.timeline import Timeline
from router.nodes.placed_prompt import PlacedPrompt

IMAGE = PromptImage(ImageSpan(0, 1, bytes(32)), b"")
CHOSEN, SPARED = ("p0", "d0"), ("p1", "d1")


class Placer:
    """Chooses a pair with busy nodes, and has one without."""

    def __init__(self) -> None:
        self.hashed: list[Sequence[int]] = []
        self.asked: list[PlacedPrompt] = []

    def check_busy(self, prompt: PlacedPrompt) -> None:
        self.asked.append(prompt)

    def prompt(
        self, tokens: Sequence[int], salt: bytes, spans: Sequence[ImageSpan], session: bytes
    ) -> PlacedPrompt:
        assert (salt, list(spans), session) == (b"salt", [IMAGE.span], b"chat")
        self.hashed.append(list(tokens))
        return PlacedPrompt(len(tokens))

    def choose(
        self, avoid: Collection[str], prefer: Collection[str], prompt: PlacedPrompt
    ) -> tuple[str, str]:
        self.asked.append(prompt)
        return CHOSEN

    def spared(self, pair: object, avoid: object, prompt: PlacedPrompt) -> tuple[str, str]:
        assert pair == CHOSEN
        return SPARED


def pair_wait(placer: Placer) -> PairWait:
    unused: Any = None
    made: Any = placer
    return PairWait(made, unused, unused, PlacementMetrics(CollectorRegistry()), unused)


def flight(share: PromptShare) -> InFlight:
    request = GenerationRequest(
        "r1",
        [1, 2, 3],
        SamplingParams(max_tokens=9),
        images=(IMAGE,),
        salt=b"salt",
        session=b"chat",
        share=share,
    )
    return InFlight(request, Timeline("r1", 0.0), 60.0)


def test_choices_hash_their_prompt_once_and_spare_busy_nodes() -> None:
    placer = Placer()
    pairs, flights = pair_wait(placer), [flight(share) for share in shares(3)]
    for each in flights:
        pairs.check_busy(each)
        assert pairs.now(each, ()) == SPARED
    assert placer.hashed == [[1, 2, 3]]
    assert [prompt.tokens for prompt in placer.asked] == [3] * 6


def test_a_retry_is_placed_with_the_answer_so_far() -> None:
    """Its client has tokens already, so it does not make room for others: any pair will do."""
    placer = Placer()
    pairs, (first, second) = pair_wait(placer), [flight(share) for share in shares(2)]
    pairs.check_busy(first)
    first.delivered.extend([4, 5])
    for _ in range(2):
        assert pairs.now(first, ()) == CHOSEN
    pairs.check_busy(second)
    assert pairs.now(second, ()) == SPARED
    assert placer.hashed == [[1, 2, 3], [1, 2, 3, 4, 5]], "again only if tokens were added"
    assert [prompt.tokens for prompt in placer.asked] == [3, 5, 5, 3, 3]
