"""The check of matrix products that a node makes under MPS, on a GPU without a limit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.node.product_check import check_products, wrong_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_right_products_pass_and_leave_no_memory() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    check_products(device)
    assert torch.cuda.memory_allocated() == before


def test_a_wrong_tile_is_found() -> None:
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        out = F.linear(x, weight)
        out[128:192, 256:512] = 9.0
        return out

    wrong = wrong_product(multiply, torch.device("cuda", 0))
    assert wrong is not None
    assert wrong.startswith("the product of 256 rows by [4096, 14336] is wrong by ")
