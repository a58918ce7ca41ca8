"""Memory that an attention block holds while its output projection runs."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from common.engine.layers.activations import Activations
from common.engine.layers.attention import Attention
from common.engine.layers.norm import RmsNorm
from common.engine.models.decoder import DecoderLayer
from tests.fakes.tiny_model import CONFIG, tiny_model


class Recorded:
    """An attention backend that keeps weak references to its inputs."""

    def __init__(self) -> None:
        self.products: list[weakref.ref[Tensor]] = []

    def store(self, layer: int, qkv: Tensor, *rest: object) -> None:
        self.products.append(weakref.ref(qkv))

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.clone()


def test_queries_and_keys_are_freed_before_the_output_projection() -> None:
    """Otherwise each prompt graph would hold one more tensor of [T, heads + 2 * kv_heads, D]."""
    layer = tiny_model().get_submodule("layers.0")
    assert isinstance(layer, DecoderLayer)
    assert isinstance(layer.mixer, Attention)
    backend, alive = Recorded(), list[bool]()
    projected = layer.mixer.o_proj.add_norm

    def add_norm(x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        alive.extend(each() is not None for each in backend.products)
        return projected(x, stream, norm)

    layer.mixer.o_proj.add_norm = add_norm  # type: ignore[method-assign]
    rows = torch.randn(3, CONFIG.hidden_size)
    with torch.inference_mode():
        layer.mixer.add_norm(
            Activations(rows),
            rows,
            layer.post_attention_layernorm,
            (rows, rows),
            backend,  # type: ignore[arg-type]
        )
    assert alive == [False]
