"""The check of matrix products that a node makes under MPS."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.node.product_check import wrong_product

CPU = torch.device("cpu")
WEIGHTS, ROWS = [(96, 64), (64, 192)], [48, 64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_products_pass(dtype: torch.dtype) -> None:
    seen = list[tuple[int, ...]]()

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((*x.shape, *weight.shape))
        return F.linear(x, weight)

    assert wrong_product(multiply, CPU, WEIGHTS, ROWS, dtype) is None
    assert seen == [(48, 64, 96, 64), (64, 64, 96, 64), (48, 192, 64, 192), (64, 192, 64, 192)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "the product of 64 rows by [64, 192] has values that are not finite"),
        (9.0, "the product of 64 rows by [64, 192] is wrong by "),
    ],
)
def test_a_wrong_tile_of_one_product_is_found(value: float, words: str) -> None:
    """As on the GPU: some columns of some adjacent rows, with some numbers of rows only."""

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        out = F.linear(x, weight)
        if x.shape == (64, 192):
            out[32:40, 16:24] = value
        return out

    assert (wrong_product(multiply, CPU, WEIGHTS, ROWS) or "").startswith(words)
