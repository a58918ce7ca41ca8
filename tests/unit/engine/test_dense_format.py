"""Products of the dense format against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from common.engine.formats.dense import DenseFormat, DenseLinear, LibraryLinear
from common.engine.layers.activations import DENSE, Activations, Quantised
from common.engine.layers.linear import Embedding
from common.engine.layers.norm import RmsNorm
from common.engine.layers.placement import Placement, parameter

PLACEMENT = Placement(torch.float32, torch.device("cpu"))
ROWS, WIDTH, OUT = 5, 12, 8


def made(product: type[DenseLinear] = DenseLinear, bias: bool = True) -> DenseLinear:
    linear = DenseFormat(PLACEMENT, product).linear(WIDTH, {"a": 3, "b": 5}, bias)
    assert isinstance(linear, DenseLinear)
    generator = torch.Generator().manual_seed(0)
    for each in linear.parameters():
        each.normal_(generator=generator)
    return linear


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("product", [DenseLinear, LibraryLinear])
def test_a_product_has_its_parts_one_after_another(product: type[DenseLinear]) -> None:
    linear, x = made(product), random(ROWS, WIDTH)
    views = {piece.name: piece.into for piece in linear.pieces()}
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "a.weight": (3, WIDTH),
        "a.bias": (3,),
        "b.weight": (5, WIDTH),
        "b.bias": (5,),
    }
    expected = [F.linear(x, views[f"{part}.weight"], views[f"{part}.bias"]) for part in "ab"]
    torch.testing.assert_close(linear.product(Activations(x)), torch.cat(expected, dim=-1))


def test_a_gated_product() -> None:
    linear, x = made(), random(ROWS, WIDTH)
    gate, up = linear.product(Activations(x)).chunk(2, dim=-1)
    torch.testing.assert_close(linear.gated(Activations(x), DENSE).tensor(), F.silu(gate) * up)


def test_a_product_added_to_the_stream_and_normed() -> None:
    linear, x, stream = made(), random(ROWS, WIDTH), random(ROWS, OUT)
    norm = RmsNorm("norm", OUT, 1e-5, PLACEMENT)
    norm.weight.copy_(random(OUT))
    normed, total = linear.add_norm(Activations(x), stream, norm)
    torch.testing.assert_close(total, stream + linear.product(Activations(x)))
    torch.testing.assert_close(normed.tensor(), norm(total))


def test_a_tied_head_is_the_embedding() -> None:
    embedding = Embedding("embed", OUT, range(OUT), parameter((OUT, WIDTH), PLACEMENT))
    head = DenseFormat(PLACEMENT).tied_head(embedding)
    assert head.dense() is embedding.weight
    assert not list(head.pieces())  # the embedding loads it


def test_a_dense_product_refuses_input_without_its_dense_rows() -> None:
    quantised = Quantised("int8", torch.zeros(1, WIDTH, dtype=torch.int8), torch.ones(1, 1))
    with pytest.raises(AssertionError, match="left out"):
        made().product(Activations(None, quantised))
