"""Computes the same model in plain torch over a whole text, token by token: no cache, pages or state between calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from tests.fakes.toy_state.record import KEY, LATENT_VALUES, VALUE


@torch.inference_mode()
def continuation(
    tensors: Mapping[str, Tensor], config: ModelConfig, prompt: list[int], count: int
) -> list[int]:
    """Return the greedy continuation of `prompt`; each token recomputes everything. `tensors`: the checkpoint's."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(tensors, config, ids).argmax()))
    return ids[len(prompt) :]


def logits(tensors: Mapping[str, Tensor], config: ModelConfig, ids: list[int]) -> Tensor:
    """Return the logits [V] after the last of `ids`."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], config.rms_norm_eps)

    def product(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].t()

    x = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        entering = norm(x, f"{layer}.input_layernorm")
        if config.kind_of(index).mixer == "latent":
            name = f"{layer}.attend_latents"
            mixed = _latents(product(entering, f"{name}.in"))
        else:
            name = f"{layer}.recur"
            mixed = _recurrence(product(entering, f"{name}.in"), config.num_heads)
        x = x + product(mixed, f"{name}.out")
        entering = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (product(entering, f"{layer}.mlp.{which}_proj") for which in ("gate", "up"))
        x = x + product(F.silu(gate) * up, f"{layer}.mlp.down_proj")
    return product(norm(x[-1], "model.norm"), "lm_head")


def _latents(projected: Tensor) -> Tensor:
    query, latent = projected[:, :-LATENT_VALUES], projected[:, -LATENT_VALUES:]
    scores = query.unflatten(1, (-1, LATENT_VALUES)) @ latent.t() * LATENT_VALUES**-0.5  # [T, heads, T]
    later = torch.ones(len(latent), len(latent), dtype=torch.bool).triu(1)
    return (scores.masked_fill(later[:, None], -torch.inf).softmax(-1) @ latent).flatten(1)


def _recurrence(projected: Tensor, heads: int) -> Tensor:
    count = len(projected)
    query, key, value, decay = projected.split((heads * KEY, heads * KEY, heads * VALUE, heads), dim=1)
    outer = key.reshape(count, heads, KEY, 1) * value.reshape(count, heads, 1, VALUE)
    state, states = torch.zeros(heads, KEY, VALUE), []
    for kept, added in zip(torch.sigmoid(decay)[:, :, None, None], outer, strict=True):
        state = kept * state + added
        states.append(state)
    return (query.reshape(count, heads, 1, KEY) @ torch.stack(states)).flatten(1)
