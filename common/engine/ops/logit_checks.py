"""Checks the arguments of kernels that go over logits, one row per draw."""

from __future__ import annotations

import torch
from torch import Tensor


def check_rows(logits: Tensor, **values: Tensor) -> tuple[int, int]:
    """Return (R, V) of logits [R, V] float32 with adjacent tokens; `values` have one number per row: [R]."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    for name, tensor in values.items():
        assert tensor.shape == (rows,), f"{name} {tuple(tensor.shape)} for {rows} rows"
        assert tensor.is_contiguous(), f"{name} must be contiguous"
    return rows, vocab
