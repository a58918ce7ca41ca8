"""The products of the chosen experts of each token with FP8 weights; see `expert_products` and `fp8_linear`.

Stacks of weights have scales per channel [E, N], or per block: [E, ceil(N / 128), ceil(K / 128)], and for gates and up
projections, which are quantised separately, [E, 2, ceil(I / 128), ceil(K / 128)].
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_grouped import fp8_expert_parts_triton
from common.engine.ops.fp8_linear import fp8_product_reference
from common.engine.ops.fp8_rows import quantize_rows_reference, quantize_with_reference
from common.engine.ops.registration import register_op
from common.engine.ops.silu_mul import silu_mul_reference


def fp8_expert_parts_reference(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    input_scales: Tensor | None,
    experts: Tensor,
    shares: Tensor,
) -> Tensor:
    """Return [T, K, H], in the dtype of x: the output of each chosen expert times its share.

    Args:
        x: [T, H].
        gate_up: codes [E, 2 * I, H], gates first.
        down: codes [E, H, I].
        input_scales: [2] float32, of the inputs of gates and of down projections; None: every row has its own.
        experts: [T, K] int32; a token has no expert twice. Negative: none, the output is zero.
        shares: [T, K] float32.
    """
    tokens, chosen = experts.shape
    blocks = down_scales.ndim == 3
    codes, row_scales = _quantised(x, blocks, input_scales, 0)
    out = x.new_zeros((tokens * chosen, x.shape[1]))
    # Pairs by expert; those without one come first.
    counts = (experts.flatten() + 1).bincount(minlength=len(gate_up) + 1).tolist()
    pairs = experts.flatten().argsort(stable=True)
    end = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            of_expert = pairs[end : end + count]
            rows = of_expert // chosen
            both = torch.cat(
                [
                    fp8_product_reference(codes[rows], row_scales[rows], weight, scales, None, x.dtype)
                    for weight, scales in zip(
                        gate_up[expert].chunk(2), gate_and_up(gate_up_scales[expert]), strict=True
                    )
                ],
                dim=-1,
            )
            inner, inner_scales = _quantised(silu_mul_reference(both), blocks, input_scales, 1)
            share = shares.view(-1, 1)[of_expert]
            made = fp8_product_reference(
                inner, inner_scales, down[expert], down_scales[expert], None, x.dtype
            )
            out[of_expert] = (made * share).to(x.dtype)
            end += count
    return out.view(tokens, chosen, x.shape[1])


def gate_and_up(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of gates and of up projections, of one expert's or of all experts' scales without that axis."""
    gate, up = scales.chunk(2) if scales.ndim == 1 else scales.unbind()
    return gate, up


def _quantised(x: Tensor, blocks: bool, scales: Tensor | None, index: int) -> tuple[Tensor, Tensor]:
    if scales is None:
        return quantize_rows_reference(x, blocks)
    return quantize_with_reference(x, scales[index])


def _fake(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    input_scales: Tensor | None,
    experts: Tensor,
    shares: Tensor,
) -> Tensor:
    return x.new_empty((*experts.shape, x.shape[1]))


fp8_expert_parts = register_op(
    "fp8_expert_parts",
    fp8_expert_parts_reference,
    mutates=(),
    fake=_fake,
    cuda=fp8_expert_parts_triton,
    inlined=False,
)
