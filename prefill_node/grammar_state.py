"""The grammars of prompts: compiled while a prompt waits, then asked for the tokens that may come first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from common.errors import RequestError
from common.grammar import mask_width
from prefill_node.request import PrefillRequest


def compiled(
    requests: Iterable[PrefillRequest], vocab_size: int, now: float
) -> Iterator[tuple[PrefillRequest, RequestError | None]]:
    """Yield the requests whose grammar is compiled by now, with the error of those that cannot be constrained."""
    for request in list(requests):
        if request.compilation is None or not request.compilation.ready(now):
            continue
        try:
            _follow(request, vocab_size)
        except RequestError as error:
            yield request, error
        else:
            yield request, None


def _follow(request: PrefillRequest, vocab_size: int) -> None:
    """Replay the answer so far, and compute the mask of the next token, if it needs one. Raises RequestError."""
    assert request.compilation is not None
    matcher = request.matcher = request.compilation.matcher()
    request.compilation = None
    matcher.accept(request.keys[request.num_tokens - request.emitted :].tolist())
    if matcher.unmasked:
        return
    mask = np.empty((1, mask_width(vocab_size)), dtype=np.int32)
    matcher.fill(mask, 0)
    if matcher.failure is not None:
        raise matcher.failure
    request.mask = mask.tobytes()
