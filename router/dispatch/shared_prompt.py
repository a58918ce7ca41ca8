"""Lets several choices of one prompt share its computation.

The first choice computes the prompt. The others wait until its pages are handed over, and are then placed on the same
nodes: there both prefix caches hold the whole pages of the prompt, so only the last, partly filled page is computed
again, and the decode node keeps the whole pages once for all choices. Each choice is an ordinary request in all other
respects. If the caches are off, or the nodes are gone or full, a choice computes the prompt again, with equal results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

from router.nodes.placed_prompt import PlacedPrompt

NO_NODES: frozenset[str] = frozenset()


class PromptShare(Protocol):
    """The part of one request in the computation of a prompt."""

    @property
    def nodes(self) -> Collection[str]:
        """Incarnations of the nodes to which the prompt's pages belong; empty if that is open."""
        ...

    @property
    def counted(self) -> bool:
        """True if usage counts the prompt tokens of this request."""
        ...

    @property
    def choices(self) -> int:
        """Number of choices of the prompt."""
        ...

    def hashed(self, prompt: Callable[[], PlacedPrompt]) -> PlacedPrompt:
        """Return the facts for placement about the prompt without any answer, which `prompt` computes."""
        ...

    def longest(self, tokens: int) -> int | None:
        """Note that a choice ended with this many tokens; return the longest choice once all have ended."""
        ...

    async def wait(self, seconds: float) -> None:
        """Wait until the prompt is computed or no request computes it any more, at most this many seconds."""
        ...

    def placed(self, prefill: str, decode: str) -> None:
        """Note that the request was placed on two nodes, given as incarnations."""
        ...

    def handed_over(self) -> None:
        """Note that the pages of the prompt are on both nodes."""
        ...

    def ended(self) -> None:
        """Note that the request has ended, for whatever reason."""
        ...


class Unshared:
    """The prompt of a request with one choice."""

    nodes = NO_NODES
    counted = True
    choices = 1

    def hashed(self, prompt: Callable[[], PlacedPrompt]) -> PlacedPrompt:
        return prompt()

    def longest(self, tokens: int) -> int | None:
        return tokens

    async def wait(self, seconds: float) -> None:
        pass

    def placed(self, prefill: str, decode: str) -> None:
        pass

    def handed_over(self) -> None:
        pass

    def ended(self) -> None:
        pass


UNSHARED = Unshared()


class FirstOfPrompt:
    """The request that computes the prompt."""

    counted = True

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self.nodes: Collection[str] = NO_NODES
        self.available = asyncio.Event()
        self._lengths: list[int] = []  # of choices that have ended
        self._hashed: PlacedPrompt | None = None

    def hashed(self, prompt: Callable[[], PlacedPrompt]) -> PlacedPrompt:
        if self._hashed is None:
            self._hashed = prompt()
        return self._hashed

    def longest(self, tokens: int) -> int | None:
        self._lengths.append(tokens)
        return max(self._lengths) if len(self._lengths) == self.choices else None

    async def wait(self, seconds: float) -> None:
        pass

    def placed(self, prefill: str, decode: str) -> None:
        self.nodes = frozenset((prefill, decode))

    def handed_over(self) -> None:
        self.available.set()

    def ended(self) -> None:
        self.available.set()


class FollowerOfPrompt:
    """A request that uses the pages computed for the first one."""

    counted = False

    def __init__(self, first: FirstOfPrompt) -> None:
        self._first = first

    @property
    def nodes(self) -> Collection[str]:
        return self._first.nodes

    @property
    def choices(self) -> int:
        return self._first.choices

    def hashed(self, prompt: Callable[[], PlacedPrompt]) -> PlacedPrompt:
        return self._first.hashed(prompt)

    def longest(self, tokens: int) -> int | None:
        return self._first.longest(tokens)

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._first.available.wait()

    def placed(self, prefill: str, decode: str) -> None:
        pass

    def handed_over(self) -> None:
        pass

    def ended(self) -> None:
        pass


def shares(count: int) -> list[PromptShare]:
    """Return the shares of `count` choices of one prompt, the first one first."""
    if count == 1:
        return [UNSHARED]
    first = FirstOfPrompt(count)
    return [first, *(FollowerOfPrompt(first) for _ in range(count - 1))]
