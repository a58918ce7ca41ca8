"""Scales of keys and values in published checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.checkpoint.kv_scales import kv_scales, power_of_two
from common.errors import ModelError


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(
        {name.replace("__", "."): value for name, value in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def test_scales_of_each_form_are_rounded_up_to_powers_of_two(tmp_path: Path) -> None:
    """One per layer, one per head, in 16 and 32 bits, and under the names of compressed-tensors and ModelOpt."""
    directory = write(
        tmp_path,
        model__layers__0__self_attn__k_scale=torch.tensor(0.03),
        model__layers__0__self_attn__v_scale=torch.tensor([0.125], dtype=torch.bfloat16),
        model__layers__1__self_attn__k_proj__k_scale=torch.tensor(1.5, dtype=torch.float16),
        model__layers__1__self_attn__v_proj__v_scale=torch.tensor(3e-5),
        model__language_model__layers__12__self_attn__k_scale=torch.tensor([[[0.1]], [[0.3]]]),
        model__layers__3__self_attn__kv_scale=torch.tensor(2.0),
        mtp__layers__0__self_attn__k_scale=torch.tensor(7.0),
        model__layers__0__mlp__down_proj__weight_scale=torch.tensor(9.0),
    )
    assert kv_scales(directory) == {
        (0, "k"): 2**-5,
        (0, "v"): 2**-3,
        (1, "k"): 2.0,
        (1, "v"): 2**-15,
        (12, "k"): 0.5,
        (3, "k"): 2.0,
        (3, "v"): 2.0,
    }


def test_powers_of_two_stay() -> None:
    assert [power_of_two(value) for value in (1.0, 0.25, 1.0001, 0.9)] == [1.0, 0.25, 2.0, 1.0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.tensor(0.0), "k_scale contains 0.0; scales are finite and positive"),
        (torch.tensor([1.0, torch.inf]), "k_scale contains inf"),
        (torch.tensor([]), r"k_scale is F32 \[0\]; a scale of keys or values is one number"),
        (torch.tensor(1), r"k_scale is I64 \[\]"),
    ],
)
def test_other_scales_are_refused(tmp_path: Path, value: torch.Tensor, says: str) -> None:
    directory = write(tmp_path, model__layers__0__self_attn__k_scale=value)
    with pytest.raises(ModelError, match=says):
        kv_scales(directory)
