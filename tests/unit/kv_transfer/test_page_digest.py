"""Checksums of pages in host memory cover exactly the bytes that a pair of ranks exchanges."""

from __future__ import annotations

import pytest
import xxhash

from kv_transfer.pair_plan import Side, StridedRows
from kv_transfer.transport.page_digest import HostDigests, block_digests
from tests.fakes.pools import layers_layout
from tests.unit.kv_transfer.rig import noise

LAYOUT = layers_layout("m", "float32", 2, 8, [(2, 4)])

# Two items of 64 bytes from byte 16 on; of each three rows of 8 bytes, 20 bytes apart, or one row of 24 bytes.
DIVIDED = StridedRows(16, 64, 8, 3, 20)
WHOLE = StridedRows(16, 64, 24, 1, 0)


def exchanged(block: StridedRows, item: int) -> list[int]:
    """Return the places of an item's bytes, in their order."""
    start = block.offset + item * block.item
    return [start + row * block.stride + at for row in range(block.rows) for at in range(block.length)]


@pytest.mark.parametrize("blocks", [(DIVIDED,), (WHOLE,), (WHOLE, DIVIDED)])
@pytest.mark.parametrize("item", [0, 1])
def test_a_checksum_is_that_of_all_rows_in_the_order_of_planes(
    blocks: tuple[StridedRows, ...], item: int
) -> None:
    memory = noise(160)
    content = bytes(memory[at] for block in blocks for at in exchanged(block, item))
    expected = xxhash.xxh3_64_intdigest(content)
    assert block_digests(memoryview(memory), blocks, [1 - item, item])[1] == expected
    own = HostDigests(memoryview(memory))
    assert own.now(Side(LAYOUT, blocks, (), False), [item]) == [expected]
    assert own.state(Side(LAYOUT, (), blocks, False), item) == expected


@pytest.mark.parametrize("block", [DIVIDED, WHOLE])
def test_every_exchanged_byte_changes_the_checksum_and_no_other_does(block: StridedRows) -> None:
    memory = bytearray(noise(160))
    [before] = block_digests(memoryview(memory), [block], [1])
    changing = []
    for at in range(len(memory)):
        memory[at] ^= 1
        if block_digests(memoryview(memory), [block], [1]) != [before]:
            changing.append(at)
        memory[at] ^= 1
    assert changing == exchanged(block, 1)
