"""Models of transformers that compute with products in FP8, and the tensors with which such checkpoints are published.

Nothing here is read with tandem's code: names, scales and rounding are written down once more, as the formats say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

HIGHEST, SIZE = 448.0, 128
# Products that engines merge, which read the same values and share a static scale.
MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"),
)


@dataclass(frozen=True)
class Numbers:
    """How one product is stored.

    Attributes:
        weights: tensor, channel or block.
        inputs: token, group (of 128 values) or tensor, whose scale is in the file.
        scale, input_scale: suffixes of the names of the scales.
        wide: scales of tensors and inputs have the shape [1], not [].
    """

    weights: str
    inputs: str
    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    scale_dtype: torch.dtype = torch.float32
    wide: bool = False


Choice = Callable[[str], Numbers | None]


def to_codes(weight: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales as files have them, the values that they stand for)."""
    if numbers.weights == "block":
        rows, columns = weight.shape
        padded = nn.functional.pad(weight, (0, -columns % SIZE, 0, -rows % SIZE))
        tiles = padded.view(padded.shape[0] // SIZE, SIZE, padded.shape[1] // SIZE, SIZE)
        scales = (tiles.abs().amax((1, 3)) / HIGHEST).to(numbers.scale_dtype)
        wide = scales.float().repeat_interleave(SIZE, 0)[:rows].repeat_interleave(SIZE, 1)[:, :columns]
    else:
        largest = weight.abs().amax(-1, keepdim=True) if numbers.weights == "channel" else weight.abs().amax()
        scales = (largest / HIGHEST).to(numbers.scale_dtype)
        wide = scales.float()
        if numbers.weights == "tensor":
            scales = scales.view(1) if numbers.wide else scales
    codes = (weight / wide).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def rounded_inputs(x: Tensor, inputs: str, static: Tensor | None) -> Tensor:
    """Return the values of x [..., K] after they were stored in FP8."""
    shape, columns = x.shape, x.shape[-1]
    if static is not None:
        values = (x / static).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn).float() * static
    else:
        if inputs == "group":
            x = nn.functional.pad(x, (0, -columns % SIZE)).unflatten(-1, (-1, SIZE))
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
        # The order of operations decides where a value in the middle between two codes goes.
        codes = (x * (largest.reciprocal() * HIGHEST)).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn)
        values = codes.float() * (largest / HIGHEST)
    return values.flatten(-2)[..., :columns] if x.ndim > len(shape) else values


def quantise_model(model: Any, tensors: Mapping[str, Tensor], choice: Choice, seed: int) -> dict[str, Tensor]:
    """Let the model compute with products in FP8, and return the tensors of its checkpoint.

    Args:
        tensors: of the dense checkpoint, with a matrix per expert.
        choice: how the product of a name without `.weight` is stored, None: as it is.
    """
    found = dict(tensors)
    generator = torch.Generator().manual_seed(seed)
    static = dict[str, Tensor]()
    products = [name.removesuffix(".weight") for name, value in tensors.items() if _is_product(name, value)]
    for name in products:
        numbers = choice(name)
        if numbers is None:
            continue
        codes, scales, values = to_codes(tensors[f"{name}.weight"].float(), numbers)
        found[f"{name}.weight"], found[f"{name}.{numbers.scale}"] = codes, scales
        if numbers.inputs == "tensor":
            scale = 0.01 + 0.05 * torch.rand(1, generator=generator)
            static[name] = scale[0]
            found[f"{name}.{numbers.input_scale}"] = scale if numbers.wide else scale[0]
        module = dict(model.named_modules()).get(name)
        if module is not None:
            module.weight.data.copy_(values)
    _share_scales(static, choice)
    for name, module in model.named_modules():
        numbers = choice(name) if isinstance(module, nn.Linear) and name in products else None
        if numbers is not None:
            module.register_forward_pre_hook(_rounding(numbers.inputs, static.get(name)))
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            _quantise_experts(module, name, found, choice, static)
    return found


def _is_product(name: str, value: Tensor) -> bool:
    return re.search(r"_proj(_[a-z]+)?\.weight$", name) is not None and value.ndim == 2


def _rounding(inputs: str, static: Tensor | None) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    return lambda module, given: (rounded_inputs(given[0], inputs, static),)


def _share_scales(static: dict[str, Tensor], choice: Choice) -> None:
    """Give neighbours of a merged product with one form the largest of their scales, and all experts of a layer."""
    stems = dict.fromkeys(name.rpartition(".")[0] for name in static)
    for stem in stems:
        for parts in MERGED:
            names = [f"{stem}.{part}" for part in parts]
            for _, run in groupby(names, choice):
                _largest(static, [name for name in run if name in static])
    layers = {name[: name.index(".experts.")] for name in static if ".experts." in name}
    for layer in layers:
        inside = [name for name in static if name.startswith((f"{layer}.experts.", f"{layer}.shared_expert"))]
        down = [name for name in inside if name.endswith("down_proj")]
        _largest(static, down)
        _largest(static, [name for name in inside if name not in down])


def _largest(static: dict[str, Tensor], names: Iterable[str]) -> None:
    names = list(names)
    if names:
        most = torch.stack([static[name] for name in names]).amax()
        static.update(dict.fromkeys(names, most))


def _quantise_experts(
    module: Any, name: str, found: Mapping[str, Tensor], choice: Choice, static: Mapping[str, Tensor]
) -> None:
    numbers = choice(f"{name}.0.gate_proj")
    if numbers is None:
        return
    inputs = numbers.inputs

    def values(index: int, part: str) -> Tensor:
        stem = f"{name}.{index}.{part}"
        scales = found[f"{stem}.{numbers.scale}"].float()
        codes = found[f"{stem}.weight"].float()
        if numbers.weights == "block":
            rows, columns = codes.shape
            scales = scales.repeat_interleave(SIZE, 0)[:rows].repeat_interleave(SIZE, 1)[:, :columns]
        return codes * scales

    for index in range(module.num_experts):
        module.gate_up_proj.data[index] = torch.cat(
            [values(index, part) for part in ("gate_proj", "up_proj")]
        )
        module.down_proj.data[index] = values(index, "down_proj")
    of_gate, of_down = (static.get(f"{name}.0.{part}") for part in ("gate_proj", "down_proj"))

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        read = rounded_inputs(x, inputs, of_gate)
        for index in range(module.num_experts):
            gate, up = (read @ module.gate_up_proj[index].T).chunk(2, -1)
            inner = rounded_inputs(module.act_fn(gate) * up, inputs, of_down)
            total += inner @ module.down_proj[index].T * (weights * (chosen == index)).sum(-1, keepdim=True)
        return total

    module.forward = forward


def matching(patterns: Iterable[str], name: str) -> bool:
    """Return whether expressions (`re:`), wildcards, whole names, or beginnings or ends of names mean a product."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif re.fullmatch(rf"(.*\.)?{re.escape(pattern)}(\..*)?".replace(r"\*", ".*"), name):
            return True
    return False
