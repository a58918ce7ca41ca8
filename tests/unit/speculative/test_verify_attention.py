"""The tree attention op, compared with one request and one node at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from common.engine.ops.verify_attention import verify_attention, verify_reference
from decode_node.speculative.tree import tree

KV_HEADS, HEADS, DIM = 2, 4, 8


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_against_a_dense_recompute(page_size: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(page_size)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]])
    made = tree(torch.zeros_like(parents), parents, 6)
    lengths = torch.tensor([6, 19, 33], dtype=torch.int32)  # including the nodes
    width = -(-40 // page_size)
    pages = 1 + torch.randperm(3 * width, generator=generator).view(3, width)
    shape = (3 * width + 1, page_size, KV_HEADS, DIM)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(18, HEADS, DIM, generator=generator)
    wanted = torch.empty_like(query)
    used = torch.zeros(shape[0] * page_size, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        places = torch.arange(length)
        slots = pages[row, places // page_size] * page_size + places % page_size
        used[slots] = True
        prefix = length - 6
        position = torch.cat((torch.arange(prefix), prefix + made.depth[row]))
        for node in range(6):
            seen = torch.cat((torch.ones(prefix, dtype=torch.bool), made.mask[row, node]))
            if window is not None:
                seen &= position > position[prefix + node] - window
            near = slots[seen]
            keys = key.view(-1, KV_HEADS, DIM)[near].transpose(0, 1)
            values = value.view(-1, KV_HEADS, DIM)[near].transpose(0, 1)
            one = query[row * 6 + node].view(KV_HEADS, -1, DIM)
            wanted[row * 6 + node] = F.scaled_dot_product_attention(one, keys, values, scale=0.3).view(
                HEADS, DIM
            )
    for plane in (key, value):
        plane.view(-1, KV_HEADS, DIM)[~used] = torch.nan  # nothing else may be read
    table = pages.to(torch.int32)
    for op in (verify_attention, verify_reference):
        out = op(query, key, value, table, lengths, made.mask, 40, window, 0.3)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
