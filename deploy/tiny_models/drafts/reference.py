"""Every draft in plain eager torch: fp32, no cache, one token at a time. Written to be verified by reading.

`load(directory, target)` returns a `Reference`. `logits_after(ids, path)` is the whole interface: the draft's logits
over the target's vocabulary after the known text `ids` and the draft tokens `path` that follow it, which is one node of
a draft tree. `propose` walks it greedily. The last of `ids` is the newest token, which the target has not read yet.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from deploy.tiny_models.drafts.features import target_features
from deploy.tiny_models.drafts.shapes import Dims, Kind, kind_of, mtp_prefix

Weights = dict[str, Tensor]


def load(directory: Path, target: LlamaForCausalLM) -> Reference:
    """Load the reference of a checked-in draft. `target` is the fp32 model for which it drafts."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    weights = {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}
    kinds: dict[Kind, type[Eagle3 | Eagle | Mtp | Standalone]] = {
        "eagle3": Eagle3,
        "eagle": Eagle,
        "mtp": Mtp,
        "standalone": Standalone,
    }
    return kinds[kind_of(config)](config, weights, target)


class Reference(ABC):
    """One draft and its target."""

    def __init__(self, config: dict[str, Any], weights: Weights, target: LlamaForCausalLM) -> None:
        self.config, self.weights, self.target = config, weights, target
        self.dims = Dims.of(config)
        self.embedding: Tensor = target.model.embed_tokens.weight
        self.head: Tensor = target.lm_head.weight

    @abstractmethod
    def logits_after(self, ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """Return `[vocab]` logits; minus infinity for tokens that the draft cannot propose."""

    def propose(self, ids: Sequence[int], steps: int) -> list[int]:
        """Return the greedy chain of `steps` draft tokens after `ids`."""
        path: list[int] = []
        for _ in range(steps):
            path.append(int(self.logits_after(ids, path).argmax()))
        return path


class Eagle3(Reference):
    """EAGLE-3: rows past the known text take the draft's own output, before `norm`, as their hidden state."""

    @torch.no_grad()
    def logits_after(self, ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        w = self.weights
        features = target_features(self.target, torch.tensor([ids[:-1]]))
        aux = [
            features.entering[i][0] for i in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        ]
        hidden = torch.cat(aux, dim=-1) @ w["fc.weight"].T  # row s: after token s
        out = chained(self._layer, hidden, [*ids[1:], *path])  # row s reads the token after its own
        logits = rms_norm(out[-1], w["norm.weight"], self.dims.eps) @ w["lm_head.weight"].T
        everything = torch.full((self.config["vocab_size"],), float("-inf"))
        everything[torch.arange(len(logits)) + w["d2t"]] = logits
        return everything

    def _layer(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        layer, eps = _below(self.weights, "midlayer."), self.dims.eps
        embedded = rms_norm(self.embedding[list(tokens)], layer["input_layernorm.weight"], eps)
        both = torch.cat((embedded, rms_norm(hidden, layer["hidden_norm.weight"], eps)), dim=-1)
        hidden = hidden + attention(both, layer, self.dims)
        return hidden + mlp(rms_norm(hidden, layer["post_attention_layernorm.weight"], eps), layer)


class Eagle(Reference):
    """EAGLE-1/2: like EAGLE-3, but with the target's last (normed) hidden state and without norms of its own."""

    @torch.no_grad()
    def logits_after(self, ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        hidden = target_features(self.target, torch.tensor([ids[:-1]])).last[0]
        out = chained(self._layer, hidden, [*ids[1:], *path])
        return out[-1] @ self.head.T

    def _layer(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        layer = _below(self.weights, "layers.0.")
        x = torch.cat((self.embedding[list(tokens)], hidden), dim=-1) @ self.weights["fc.weight"].T
        x = x + attention(x, layer, self.dims)
        return x + mlp(rms_norm(x, layer["post_attention_layernorm.weight"], self.dims.eps), layer)


class Mtp(Reference):
    """MTP: step k runs module k over all known rows, with ids shifted by one more, on module k-1's output.

    A single module runs at every step: rows past the known text take its own output as their hidden state.
    """

    @torch.no_grad()
    def logits_after(self, ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        hidden = target_features(self.target, torch.tensor([ids[:-1]])).last[0]
        if self.config["num_nextn_predict_layers"] == 1:
            only = partial(self._module, _below(self.weights, mtp_prefix(self.config, 0)))
            return chained(only, hidden, [*ids[1:], *path])[-1] @ self.head.T
        if len(path) >= self.config["num_nextn_predict_layers"]:
            raise ValueError(
                f"{self.config['num_nextn_predict_layers']} MTP modules cannot draft step {len(path) + 1}"
            )
        known = [*ids, *path]
        for module in range(len(path) + 1):
            tokens = known[1 + module : 1 + module + len(hidden)]
            hidden = self._module(_below(self.weights, mtp_prefix(self.config, module)), hidden, tokens)
        return hidden[-1] @ self.head.T

    def _module(self, layer: Weights, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        eps = self.dims.eps
        embedded = rms_norm(self.embedding[list(tokens)], layer["enorm.weight"], eps)
        both = torch.cat((embedded, rms_norm(hidden, layer["hnorm.weight"], eps)), dim=-1)
        x = both @ layer["eh_proj.weight"].T
        x = x + attention(rms_norm(x, layer["input_layernorm.weight"], eps), layer, self.dims)
        x = x + mlp(rms_norm(x, layer["post_attention_layernorm.weight"], eps), layer)
        return rms_norm(x, layer["shared_head.norm.weight"], eps)


class Standalone(Reference):
    """A small Llama that reads only the text and nothing from the target."""

    @torch.no_grad()
    def logits_after(self, ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        w, eps = self.weights, self.dims.eps
        x = w["model.embed_tokens.weight"][[*ids, *path]]
        for index in range(self.config["num_hidden_layers"]):
            layer = _below(w, f"model.layers.{index}.")
            x = x + attention(rms_norm(x, layer["input_layernorm.weight"], eps), layer, self.dims)
            x = x + mlp(rms_norm(x, layer["post_attention_layernorm.weight"], eps), layer)
        return rms_norm(x[-1], w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def chained(run: Callable[[Tensor, Sequence[int]], Tensor], hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the output rows of `run` for all tokens; rows past those of `hidden` read the output of the row before."""
    out = run(hidden, tokens[: len(hidden)])
    while len(hidden) < len(tokens):
        hidden = torch.cat((hidden, out[-1:]))
        out = run(hidden, tokens[: len(hidden)])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square and scale it."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def mlp(x: Tensor, layer: Weights) -> Tensor:
    """SiLU-gated MLP."""
    gate = F.silu(x @ layer["mlp.gate_proj.weight"].T)
    return (gate * (x @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T


def attention(x: Tensor, layer: Weights, dims: Dims) -> Tensor:
    """Compute causal attention over rows x `[rows, inputs]`; row s is at position s."""
    rows = len(x)
    q = (x @ layer["self_attn.q_proj.weight"].T).view(rows, dims.heads, dims.head_dim)
    k = (x @ layer["self_attn.k_proj.weight"].T).view(rows, dims.kv_heads, dims.head_dim)
    v = (x @ layer["self_attn.v_proj.weight"].T).view(rows, dims.kv_heads, dims.head_dim)
    q, k = _rotary(q, dims), _rotary(k, dims)
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    mixed = []
    for head in range(dims.heads):
        kv = head * dims.kv_heads // dims.heads
        scores = (q[:, head] @ k[:, kv].T / dims.head_dim**0.5).masked_fill(later, float("-inf"))
        mixed.append(scores.softmax(-1) @ v[:, kv])
    return torch.cat(mixed, dim=-1) @ layer["self_attn.o_proj.weight"].T


def _rotary(x: Tensor, dims: Dims) -> Tensor:
    """Apply RoPE: the first half of a head's dimensions are real parts, the second half imaginary parts."""
    half = dims.head_dim // 2
    frequency = dims.rope_theta ** -(torch.arange(half) / half)
    angle = torch.arange(len(x))[:, None, None] * frequency  # [rows, 1, half]
    real, imaginary = x[..., :half], x[..., half:]
    return torch.cat(
        (real * angle.cos() - imaginary * angle.sin(), imaginary * angle.cos() + real * angle.sin()), dim=-1
    )


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
