"""The comparison of quantised rows accepts other roundings and refuses wrong results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.fp8_gated import fp8_gated_reference
from common.engine.ops.fp8_rows import quantize_rows_reference
from tests.fakes.near_codes import assert_near_codes

ROWS, INTER, DEPTH = 16, 1024, 512


def product(
    x: Tensor, weight: Tensor, scales: Tensor, error: float, blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up, quantised, of sums with a random error relative to their root mean square."""
    codes, row_scales = quantize_rows_reference(x)
    sums = codes.float() * row_scales @ weight.float().T * scales
    sums += error * sums.pow(2).mean().sqrt() * torch.randn_like(sums)
    gate, up = sums.bfloat16().chunk(2, -1)
    return quantize_rows_reference(torch.nn.functional.silu(gate) * up, blocks)


def made() -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(2 * INTER, DEPTH).to(FP8)
    return torch.randn(ROWS, DEPTH), weight, (torch.rand(2 * INTER) + 0.5) / DEPTH**0.5


@pytest.mark.parametrize("blocks", [False, True])
def test_other_roundings_are_accepted(blocks: bool) -> None:
    given = made()
    expected = product(*given, 0.0, blocks)
    found = product(*given, 0.001, blocks)
    assert not torch.equal(found[0].float(), expected[0].float())
    assert_near_codes(found, expected)
    if not blocks:
        rows = quantize_rows_reference(given[0])
        reference = fp8_gated_reference(*rows, *given[1:], None, "silu", torch.bfloat16)
        assert_near_codes(expected, reference)


def test_a_large_value_may_have_another_code() -> None:
    """One that is 20 times the root mean square, whose code is farther away than this."""
    values = torch.randn(1, 4096).clamp(-2, 2)
    values[0, :2] = torch.tensor([24.0, 21.0])
    expected = quantize_rows_reference(values)
    codes = expected[0].view(torch.uint8).clone()
    codes[0, 1] += 1
    assert_near_codes((codes.view(FP8), expected[1]), expected)
    codes[0, 1] += 1
    with pytest.raises(AssertionError, match="more than a code"):
        assert_near_codes((codes.view(FP8), expected[1]), expected)


def test_wrong_products_are_refused() -> None:
    x, weight, scales = made()
    expected = product(x, weight, scales, 0.0)
    swapped = product(x, weight.view(torch.uint8).roll(INTER, 0).view(FP8), scales.roll(INTER), 0.0)
    of_gates = product(x, weight, scales[:INTER].repeat(2), 0.0)
    for found in (swapped, of_gates):
        with pytest.raises(AssertionError, match="whole"):
            assert_near_codes(found, expected)
    one = scales.clone()
    one[INTER + 7] *= 1.5
    of_row = expected[1].clone()
    of_row[3] *= 1.25
    for found in (product(x, weight, one, 0.0), (expected[0], of_row)):
        # Which of both checks fails first depends on the size of the column or row.
        with pytest.raises(AssertionError):
            assert_near_codes(found, expected)
