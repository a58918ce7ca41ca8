"""Plain decoding with keys and values rounded to e4m3, without pages: a reference that shares no code with tandem's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.models.causal_lm import CausalLM
from common.engine.ops.rotary import rotary
from common.kv_cache.kv_values import KvValues

LARGEST = 448.0


def rounded(values: Tensor, scale: float) -> Tensor:
    """Return the values that e4m3 represents, times `scale`."""
    return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


class RoundedAttention:
    """Causal attention of one request over this forward's own tokens. Implements what a text model calls."""

    def __init__(self, model: CausalLM, kv: KvValues) -> None:
        self._heads, self._kv_heads = model.config.num_heads, model.config.num_kv_heads
        self._scales = kv.scales

    def plan(self, batch: object) -> None:
        """No-op: nothing depends on a batch."""

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        assert q_weight is None, "the models of these tests have no norm of queries and keys"
        last = self._heads + self._kv_heads
        qkv[:, :last] = rotary(qkv[:, :last], *angles)
        key, value = qkv[:, self._heads : last], qkv[:, last:]
        key.copy_(rounded(key, self._scales.get((layer, "k"), 1.0)))
        value.copy_(rounded(value, self._scales.get((layer, "v"), 1.0)))

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    def mix(self, *_: object) -> Tensor:
        raise AssertionError("the models of these tests have attention layers only")

    def token_slots(self) -> None:
        """Return None: there are no slots."""


def rounded_logits(model: CausalLM, ids: Sequence[int], kv: KvValues) -> Tensor:
    """Return the logits [n, V] after each token of a text."""
    embeds = model.embed(torch.tensor(ids))
    body = model(embeds, torch.arange(len(ids)), RoundedAttention(model, kv))
    return model.compute_logits(body.last)


@torch.inference_mode()
def rounded_continuation(model: CausalLM, prompt: Sequence[int], count: int, kv: KvValues) -> list[int]:
    """Return `count` greedy tokens, each from a forward over the whole text."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(rounded_logits(model, ids, kv)[-1].argmax()))
    return ids[len(prompt) :]
