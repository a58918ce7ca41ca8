"""Parts of pages and of state slots on a GPU, copied and summed up by torch: for ranks that do not send whole pages.

The checksum is that of `pages`, over the words of all blocks in order. Nothing here waits for the device.
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
        src, dst: flat uint8, whole pools.
        items: [2, n] pages or slots.
    """
    for part in parts:
        word = math.gcd(_word(part.src), _word(part.dst))
        rows = _rows(src, part.src, word).index_select(0, items[0].long())
        _rows(dst, part.dst, word).index_copy_(0, items[1].long(), rows)


def add_sums(memory: Tensor, blocks: Sequence[Block], items: Tensor, sums: Tensor, first: int = 0) -> None:
    """Add the checksums of items [n] of the pool `memory` to `sums` [n] int64, on the current stream.

    `first` numbers the first word: 0, or `words` of the blocks before.
    """
    for block in blocks:
        rows = _rows(memory, block, _word(block)).index_select(0, items.long())
        count = words([block])
        data = rows.reshape(len(items), -1).view(WORDS[block.rows * block.length // count])
        inside = torch.arange(first, first + count, device=memory.device)
        sums += mixed_words(data, inside).sum(1)
        first += count


def words(blocks: Sequence[Block]) -> int:
    """Words of one item over these blocks: equally many on both sides of a pair."""
    return sum(block.rows * block.length // math.gcd(8, block.rows * block.length) for block in blocks)


def _rows(memory: Tensor, block: Block, word: int) -> Tensor:
    """[items, rows, words] view of one block in every item that `memory` has room for."""
    flat = memory[: memory.numel() // word * word].view(WORDS[word])
    end = block.offset + (block.rows - 1) * block.stride + block.length
    count = 1 + (memory.numel() - end) // block.item
    shape = (count, block.rows, block.length // word)
    return flat.as_strided(shape, (block.item // word, block.stride // word, 1), block.offset // word)


def _word(block: Block) -> int:
    return math.gcd(8, *block[:3], block.stride)
