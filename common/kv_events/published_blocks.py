"""Turns what the prefix caches of a node take and give up into KV events: which blocks can be found there.

A block is `block_tokens` tokens of a prompt; a cache holds pages. The cache of a prefix is whole from its beginning, so
a block is there as long as the page in which it ends. Two prompts may have the same block on different pages (those of
drafts also depend on the tokens that follow): it is stored with the first of them, and removed with the last.

Blocks are named by the hashes of block_hashes.py, which begin with the salt of the prompt. The salt itself is in no
event, and neither are the tokens of a prompt that has one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from common.kv_cache.block_hashes import TOKEN_BYTES, BlockChain, chain_start
from common.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event

BLOCKS_PER_TURN = 32  # hashed between two pauses
BLOCKS_PER_EVENT = 64


@dataclass(frozen=True, slots=True)
class Adopted:
    """A cache has taken pages of a prompt."""

    medium: str
    page_tokens: int
    salt: bytes
    tokens: bytes  # int32 in little-endian order, from the start of the prompt
    plain: int  # this many of them, from the start, are token ids: those before the first image
    first: int  # pages of the prompt before `pages`
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """A cache has given up pages."""

    medium: str
    pages: tuple[int, ...]


CacheChange: TypeAlias = Adopted | Evicted


@dataclass(slots=True)
class _Tier:
    """The blocks on one medium, parents before children."""

    pages: dict[int, tuple[int, ...]] = field(default_factory=dict)  # page -> hashes of blocks that end in it
    blocks: dict[int, _Block] = field(default_factory=dict)  # hash ->


@dataclass(slots=True)
class _Block:
    parent: int | None  # hash
    copies: int = 0


class PublishedBlocks:
    """The blocks that a node has announced. It is used by one thread."""

    def __init__(self, block_tokens: int, token_ids: bool, pause: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            token_ids: whether events have the tokens of prompts without a salt.
            pause: called after every few blocks, so that other threads can run.
        """
        self._block_tokens = block_tokens
        self._token_ids = token_ids
        self._pause = pause
        self._tiers: dict[str, _Tier] = {}

    def __len__(self) -> int:
        """Return the number of blocks; one that is on two media counts twice."""
        return sum(len(tier.blocks) for tier in self._tiers.values())

    def apply(self, change: CacheChange) -> list[Event]:
        """Return the events of a change, in order."""
        if isinstance(change, Evicted):
            events = self._removed(change.medium, change.pages)
            return [*events, AllBlocksCleared()] if events and not len(self) else events
        return self._stored(change)

    def snapshot(self) -> list[Event]:
        """Return events that lead to the present state from any other, without the tokens of the blocks."""
        events: list[Event] = [AllBlocksCleared()]
        for medium, tier in self._tiers.items():
            run: list[int] = []
            first: int | None = None
            for number, (block, known) in enumerate(tier.blocks.items()):
                if not run or known.parent != run[-1] or len(run) == BLOCKS_PER_EVENT:
                    if run:
                        events.append(self._event(run, first, (), medium))
                    run, first = [], known.parent
                run.append(block)
                if number % (64 * BLOCKS_PER_TURN) == 0:
                    self._pause()
            if run:
                events.append(self._event(run, first, (), medium))
        return events

    def _stored(self, change: Adopted) -> list[Event]:
        tier = self._tiers.setdefault(change.medium, _Tier())
        # A page that is used again was given up, although that was not heard.
        events = self._removed(change.medium, [page for page in change.pages if page in tier.pages])
        hashes = self._hashes(change)
        added: list[int] = []  # numbers of blocks
        for at, page in enumerate(change.pages, change.first):
            ending = range(
                at * change.page_tokens // self._block_tokens,
                min((at + 1) * change.page_tokens // self._block_tokens, len(hashes)),
            )
            if ending:
                tier.pages[page] = hashes[ending.start : ending.stop]
            for number in ending:
                block = tier.blocks.get(hashes[number])
                if block is None:
                    block = tier.blocks[hashes[number]] = _Block(hashes[number - 1] if number else None)
                    added.append(number)
                block.copies += 1
        plain = self._plain_blocks(change)
        runs = [
            *_runs([each for each in added if each < plain]),
            *_runs([each for each in added if each >= plain]),
        ]
        for run in runs:
            parent = hashes[run.start - 1] if run.start else None
            tokens = self._tokens(change, run) if run.start < plain else ()
            events.append(self._event(hashes[run.start : run.stop], parent, tokens, change.medium))
        return events

    def _removed(self, medium: str, pages: Sequence[int]) -> list[Event]:
        tier, gone = self._tiers.get(medium, _Tier()), list[int]()
        for page in pages:
            for each in tier.pages.pop(page, ()):
                block = tier.blocks[each]
                block.copies -= 1
                if not block.copies:
                    del tier.blocks[each]
                    gone.append(each)
        return [BlockRemoved(gone, medium)] if gone else []

    def _hashes(self, change: Adopted) -> tuple[int, ...]:
        chain, size = chain_start(change.salt), BLOCKS_PER_TURN * self._block_tokens * TOKEN_BYTES
        found: list[int] = []
        for start in range(0, len(change.tokens), size):
            chain = BlockChain((), chain.digest).extended(
                change.tokens[start : start + size], self._block_tokens
            )
            found += chain.hashes
            self._pause()
        return tuple(found)

    def _plain_blocks(self, change: Adopted) -> int:
        """Return how many of its first blocks are told with their tokens."""
        return change.plain // self._block_tokens if self._token_ids and not change.salt else 0

    def _tokens(self, change: Adopted, blocks: range) -> Sequence[int]:
        size = self._block_tokens * TOKEN_BYTES
        return array("i", change.tokens[blocks.start * size : blocks.stop * size]).tolist()

    def _event(
        self, hashes: Sequence[int], parent: int | None, tokens: Sequence[int], medium: str
    ) -> BlockStored:
        return BlockStored(hashes, parent, tokens, self._block_tokens, None, medium, None)


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield consecutive numbers as ranges, none larger than an event."""
    begun = 0
    for at in range(1, len(numbers) + 1):
        over = at == len(numbers) or at - begun == BLOCKS_PER_EVENT
        if over or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[begun], numbers[at - 1] + 1)
            begun = at
