"""The layers of CLIP's and SigLIP's towers over images of one size, as many as are used.

Queries, keys and values are one product. Source: arXiv 2103.00020, 2303.15343; names and defaults are transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.engine.attention.segments import Segments, attend_within, segments_of
from common.engine.layers.linear import Linear
from common.engine.layers.placement import Placement, parameter
from common.errors import ModelError
from common.json_fields import positive

CLIP = "clip_vision_model"
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True, slots=True)
class TowerShape:
    """What a tower is built from."""

    clip: bool  # a class token in front, a norm behind the embeddings, no bias of patches; else SigLIP
    width: int
    inner: int
    layers: int
    heads: int
    grid: int  # patches, both sides
    patch: int  # pixels, both sides
    activation: str
    eps: float

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any]) -> TowerShape:
        """`options`: vision_config. Raises ModelError."""
        defaults, where = DEFAULTS[kind], "vision_config"
        sizes = {
            key: positive(options, key, where, default)
            for key, default in defaults.items()
            if isinstance(default, int)
        }
        width, heads, patch = sizes["hidden_size"], sizes["num_attention_heads"], sizes["patch_size"]
        if width % heads or sizes["num_channels"] != 3 or sizes["image_size"] < patch:
            raise ModelError(
                f"{where}: {heads} heads over {width} values, {sizes['num_channels']} channels, patches of {patch} in "
                f"{sizes['image_size']} pixels are not supported"
            )
        eps = options.get("layer_norm_eps", defaults["layer_norm_eps"])
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise ModelError(f"{where}: layer_norm_eps must be a small positive number, found {eps!r}")
        return cls(
            clip=kind == CLIP,
            width=width,
            inner=sizes["intermediate_size"],
            layers=sizes["num_hidden_layers"],
            heads=heads,
            grid=sizes["image_size"] // patch,
            patch=patch,
            activation=str(options.get("hidden_act", defaults["hidden_act"])),
            eps=eps,
        )

    @property
    def positions(self) -> int:
        return self.grid**2 + self.clip


def activation(name: str) -> Any:
    """Raises ModelError for one that transformers does not know."""
    from transformers.activations import ACT2FN  # seconds, and nothing that text alone needs

    if name not in ACT2FN:
        raise ModelError(f"{name!r} is not one of transformers' activations")
    return ACT2FN[name]


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter((size,), placement)
        self.bias = parameter((size,), placement)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class ClipLayer(nn.Module):
    """Norm, attention within an image, norm, MLP around one stream."""

    def __init__(self, shape: TowerShape, act: Any, placement: Placement) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = LayerNorm(width, shape.eps, placement)
        self.norm2 = LayerNorm(width, shape.eps, placement)
        self.qkv = Linear(width, dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), True, placement)
        self.out = Linear(width, {"out_proj": width}, True, placement)
        self.fc1 = Linear(width, {"fc1": shape.inner}, True, placement)
        self.fc2 = Linear(shape.inner, {"fc2": width}, True, placement)
        self.act = act

    def forward(self, x: Tensor, images: Segments) -> Tensor:
        """[N, C] -> [N, C], all rows of an image behind each other."""
        x = x + self._attended(self.norm1(x), images)
        inner = self.act(F.linear(self.norm2(x), self.fc1.weight, self.fc1.bias))
        return x + F.linear(inner, self.fc2.weight, self.fc2.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, norm in (("layer_norm1", self.norm1), ("layer_norm2", self.norm2)):
            for part, tensor in norm.named_parameters():
                yield f"{prefix}.{name}.{part}", tensor
        yield from self.qkv.checkpoint_tensors(f"{prefix}.self_attn")
        yield from self.out.checkpoint_tensors(f"{prefix}.self_attn")
        yield from self.fc1.checkpoint_tensors(f"{prefix}.mlp")
        yield from self.fc2.checkpoint_tensors(f"{prefix}.mlp")

    def _attended(self, x: Tensor, images: Segments) -> Tensor:
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias).view(len(x), 3, self.heads, -1)
        query, key, value = qkv.unbind(1)
        attended = attend_within(query, key, value, images)
        return F.linear(attended.flatten(1), self.out.weight, self.out.bias)


class ClipTower(nn.Module):
    """Pixels to the states between layers. `depth`: layers, of those that the checkpoint has."""

    def __init__(self, shape: TowerShape, depth: int, placement: Placement) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.patch = Linear(3 * shape.patch**2, {"patch_embedding": width}, not shape.clip, placement)
        self.position = parameter((shape.positions, width), placement)
        self.first = parameter((width,), placement) if shape.clip else None
        self.norm = LayerNorm(width, shape.eps, placement) if shape.clip else None
        act = activation(shape.activation)
        self.layers = nn.ModuleList(ClipLayer(shape, act, placement) for _ in range(depth))

    def forward(self, pixels: Tensor, wanted: frozenset[int]) -> dict[int, Tensor]:
        """[I, 3, size, size] -> states [I, positions, C] behind so many layers each."""
        count, positions = len(pixels), self.shape.positions
        starts = torch.arange(0, (count + 1) * positions, positions, dtype=torch.int32, device=pixels.device)
        images = segments_of((positions,) * count, starts)
        state = self._embedded(pixels)
        if self.norm is not None:
            state = self.norm(state)
        state = state.flatten(0, 1)
        states = {}
        for depth in range(1 + len(self.layers)):
            if depth:
                state = self.layers[depth - 1](state, images)
            if depth in wanted:
                states[depth] = state.view(count, positions, -1)
        return states

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By names within the tower."""
        side = self.shape.patch
        for name, tensor in self.patch.checkpoint_tensors("embeddings"):
            yield name, tensor.view(-1, 3, side, side) if tensor.ndim == 2 else tensor
        yield "embeddings.position_embedding.weight", self.position
        if self.first is not None and self.norm is not None:
            yield "embeddings.class_embedding", self.first
            for part, tensor in self.norm.named_parameters():
                yield f"pre_layrnorm.{part}", tensor  # so spelled in every checkpoint
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, ClipLayer)
            yield from layer.checkpoint_tensors(f"encoder.layers.{index}")

    def _embedded(self, pixels: Tensor) -> Tensor:
        """[I, positions, C]. The convolution over whole patches is a product; pixels behind the last are not seen."""
        grid, side = self.shape.grid, self.shape.patch
        count = len(pixels)
        seen = pixels[:, :, : grid * side, : grid * side].reshape(count, 3, grid, side, grid, side)
        patches = seen.permute(0, 2, 4, 1, 3, 5).reshape(count, grid * grid, 3 * side * side)
        embedded = F.linear(patches, self.patch.weight, self.patch.bias)
        if self.first is not None:
            embedded = torch.cat((self.first.expand(count, 1, -1), embedded), dim=1)
        return embedded + self.position
