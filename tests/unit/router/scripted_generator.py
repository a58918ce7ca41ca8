"""A generator with scripted answers that counts how its requests end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from common.messages.generation import OutputToken, TokenLogprob
from router.dispatch.generation import GenerationRequest, TakeNow, TokenDelta, take_nothing

Step = TokenDelta | float | BaseException  # tokens; seconds to wait; an error to raise


@dataclass
class ScriptedGenerator:
    """Requests take scripts in order; the last script serves all later ones.

    After the first delta, every other one is offered to `take_now`, so that answers mix both ways of reading.
    """

    scripts: list[Sequence[Step]] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # ids of requests closed before the end of their script
    active: int = 0

    def will(self, *steps: Step) -> None:
        self.scripts.append(steps)

    async def generate(
        self, request: GenerationRequest, take_now: TakeNow = take_nothing
    ) -> AsyncGenerator[TokenDelta, None]:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.requests.append(request)
        self.active += 1
        whole = False
        deltas = 0
        try:
            for step in script:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, TokenDelta):
                    deltas += 1
                    offered = step.finish_reason is None and deltas % 2 == 0
                    if not (offered and take_now(step.tokens)):
                        yield step
                else:
                    await asyncio.sleep(step)
            whole = True
        finally:
            self.active -= 1
            if not whole:
                self.closed.append(request.request_id)


def delta(
    ids: Sequence[int], finish_reason: str | None = None, cached: int | None = None, top: int | None = None
) -> TokenDelta:
    """Return tokens that arrive together; `top`: with log-probabilities and this many alternatives."""
    return TokenDelta([OutputToken(each, _logprob(each, top)) for each in ids], finish_reason, cached)


def one_by_one(ids: Sequence[int], finish_reason: str = "length", top: int | None = None) -> list[Step]:
    last = len(ids) - 1
    return [
        delta([each], finish_reason if i == last else None, 3 if i == 0 else None, top)
        for i, each in enumerate(ids)
    ]


def _logprob(token: int, top: int | None) -> TokenLogprob | None:
    if top is None:
        return None
    ids = tuple(range(token, token + top))
    return TokenLogprob(-0.5, ids, tuple(-0.5 - i for i in range(top)))
