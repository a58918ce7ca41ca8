"""Copies and sums up parts of pages and state slots on a GPU with torch, for ranks that do not send whole pages.

The checksum is that of `pages`, over the words of all blocks in order. Nothing in this module waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kv_transfer.pair_plan import Block, Part
from kv_transfer.transport.cuda.pages import WORDS, mixed_words


def copy_parts(src: Tensor, dst: Tensor, parts: Sequence[Part], items: Tensor) -> None:
    """Copy items[0] of `src` to items[1] of `dst`, on the current stream.

    Args:
        src, dst: the whole pools, flat uint8.
        items: [2, n] page or slot ids.
    """
    for part in parts:
        word = math.gcd(_word(part.src), _word(part.dst))
        rows = _rows(src, part.src, word).index_select(0, items[0].long())
        _rows(dst, part.dst, word).index_copy_(0, items[1].long(), rows)


def add_sums(memory: Tensor, blocks: Sequence[Block], items: Tensor, sums: Tensor, first: int = 0) -> None:
    """Add the checksums of items [n] of the pool `memory` to `sums` [n] int64, on the current stream.

    `first` is the number of the first word: 0, or `words` of the preceding blocks.
    """
    for block in blocks:
        rows = _rows(memory, block, _word(block)).index_select(0, items.long())
        count = words([block])
        data = rows.reshape(len(items), -1).view(WORDS[block.rows * block.length // count])
        inside = torch.arange(first, first + count, device=memory.device)
        sums += mixed_words(data, inside).sum(1)
        first += count


def words(blocks: Sequence[Block]) -> int:
    """Return the words of one item over these blocks, which are equal on both sides of a pair."""
    return sum(block.rows * block.length // math.gcd(8, block.rows * block.length) for block in blocks)


def _rows(memory: Tensor, block: Block, word: int) -> Tensor:
    """Return a [items, rows, words] view of one block in every item that fits into `memory`."""
    flat = memory[: memory.numel() // word * word].view(WORDS[word])
    end = block.offset + (block.rows - 1) * block.stride + block.length
    count = 1 + (memory.numel() - end) // block.item
    shape = (count, block.rows, block.length // word)
    return flat.as_strided(shape, (block.item // word, block.stride // word, 1), block.offset // word)


def _word(block: Block) -> int:
    return math.gcd(8, *block[:3], block.stride)
