"""The grammars of requests on a decode node: compiled while pages are on their way, then followed token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from common.errors import RequestError
from common.grammar import mask_width
from decode_node.request import DecodeRequest
from decode_node.step_plan import Masks
from decode_node.step_result import Trees

# Seconds for one mask of the most complex grammar that the limits of common/grammar allow, on a busy core.
SLOWEST_MASK = 0.02


def follow_compiled(
    arrived: Iterable[DecodeRequest], now: float
) -> Iterator[tuple[DecodeRequest, RequestError]]:
    """Give requests the matchers of grammars that are compiled by now; yield those that cannot be constrained."""
    for request in list(arrived):
        try:
            request.follow_grammar(now)
        except RequestError as error:
            yield request, error


def failed_grammars(batch: Sequence[DecodeRequest]) -> Iterator[tuple[DecodeRequest, RequestError]]:
    """Yield the requests whose matcher cannot go on."""
    for request in batch:
        if request.failure is not None and not request.ended:
            yield request, request.failure


def step_masks(generation: int, batch: Sequence[DecodeRequest], trees: Trees, vocab_size: int) -> Masks:
    """Compute the masks of a step: one for each node of the trees of requests that need any.

    A matcher that fails meanwhile allows every token; its request has a `failure` afterwards.
    """
    nodes, width = trees.nodes, mask_width(vocab_size)
    masked = [index for index, request in enumerate(batch) if request.masked]
    rows = tuple(index * nodes + node for index in masked for node in range(nodes))
    buffer = bytearray(4 * width * len(rows))
    words = np.frombuffer(buffer, dtype=np.int32).reshape(len(rows), width)
    for place, index in enumerate(masked):
        request = batch[index]
        assert request.matcher is not None
        if nodes == 1:
            request.matcher.fill(words, place)
        else:
            tokens = [request.output[-1], *trees.tokens[index]]
            request.matcher.fill_tree(words, place * nodes, tokens, [-1, *trees.parents[index]])
    return Masks(generation=generation, rows=rows, words=buffer)
