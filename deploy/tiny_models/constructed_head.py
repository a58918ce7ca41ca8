"""Builds an EAGLE-3 head for a constructed target that drafts correctly after a chosen share of all tokens.

P is random with orthonormal rows [kv_dim, hidden]. The row of token t + 1 reads its embedding E and the hidden state
after token t, which is P^T P E[t] both from `fc` and from every draft step. Attention attends to its own row (equal
keys and queries); its value is P E[t + 1] - P E[t], so the residual sums to P^T P E[t + 1]. The draft's LM head has
that direction in the row of succ(t + 1), so every step drafts correctly. For a random share of 1 - acceptance of the
tokens the rows are permuted cyclically, so the draft is wrong there. A share of `second` of these keeps the correct
token as the runner-up, which a draft tree finds. Tokens are wrong independently of each other, so 3 steps emit
1 + p + p^2 + p^3 tokens per round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from deploy.tiny_models.constructed_shape import EPS, GAP, Shape, draft_ids, embedding, normal, successor

FOCUS = 14.0  # score of a row's own key; other keys score FOCUS / sqrt(head_dim) in root mean square
RUNNER_UP = 0.6  # logit of a runner-up relative to a correct draft
NOISE = 1e-4  # added to `fc`, times 1 / sqrt(columns), so that its rows have full rank


@dataclass(frozen=True)
class Drafting:
    """The quality of the head."""

    acceptance: float = 0.8  # share of tokens after which it drafts correctly
    second: float = 0.5  # share of the other tokens after which the correct token comes second

    def __post_init__(self) -> None:
        if not (0 <= self.acceptance <= 1 and 0 <= self.second <= 1):
            raise ValueError(
                f"acceptance and second must be between 0 and 1, not {self.acceptance} and {self.second}"
            )


def aux_layers(shape: Shape) -> tuple[int, int, int]:
    """Layer boundaries of the target that the head reads: the usual ones, or both ends and the middle of few layers."""
    if shape.layers < 3:
        raise ValueError(f"an EAGLE-3 head reads three layers, but the target has {shape.layers}")
    few = shape.layers < 8
    return (0, shape.layers // 2, shape.layers - 1) if few else (2, shape.layers // 2, shape.layers - 3)


def head_config(shape: Shape) -> dict[str, object]:
    """config.json in the form in which EAGLE-3 heads are published."""
    return {
        **shape.config(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.hidden,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(aux_layers(shape)),
            "use_aux_hidden_state": True,
        },
        "aux_layer_convention": "boundary",
        "norm_before_residual": False,
    }


def head_tensors(
    shape: Shape, drafting: Drafting, seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on `device`) of every weight: bf16, except d2t (int64) and t2d (bool)."""
    generator = torch.Generator(device).manual_seed(seed + 2)
    random = partial(normal, generator)
    hidden, width, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if kv > hidden:
        raise ValueError(f"{kv} KV dimensions: their rows cannot be orthonormal in {hidden} dimensions")
    basis = torch.linalg.qr(torch.randn(hidden, kv, generator=generator, device=device)).Q.T  # P
    scale, group = 1 / math.sqrt(hidden), shape.heads // shape.kv_heads
    keys = torch.randn(kv, hidden, generator=generator, device=device) * scale
    per_head = keys.view(shape.kv_heads, shape.head_dim, hidden).repeat_interleave(group, 0)
    output = basis.view(shape.kv_heads, shape.head_dim, hidden).repeat_interleave(group, 0) / group
    layer = {
        "self_attn.q_proj": beside(per_head.reshape(width, hidden) * (FOCUS / math.sqrt(shape.head_dim)), 0),
        "self_attn.k_proj": beside(keys, 0),
        "self_attn.v_proj": beside(basis, -math.sqrt(kv / hidden)),
        "self_attn.o_proj": output.reshape(width, hidden).T,
        "mlp.gate_proj": random(shape.inter, hidden, scale),
        "mlp.up_proj": random(shape.inter, hidden, scale),
        "mlp.down_proj": random(hidden, shape.inter, EPS / math.sqrt(shape.inter)),
    }
    projection = (basis.T @ basis / 3).repeat(1, 3)
    yield "fc.weight", (projection + random(hidden, 3 * hidden, NOISE * scale)).to(torch.bfloat16)
    for name, weight in layer.items():
        yield f"midlayer.{name}.weight", weight.to(torch.bfloat16)
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    for name in norms:
        yield f"{name}.weight", torch.ones(hidden, dtype=torch.bfloat16, device=device)
    ids = draft_ids(shape, seed).to(device)
    embeds = embedding(shape, seed, device)[ids].float()
    # norm(P^T P E) is sqrt(hidden / kv) times P^T P E, whose squared norm is kv.
    states = embeds @ basis.T @ basis * (GAP / math.sqrt(kv * hidden))
    yield "lm_head.weight", draft_rows(shape, drafting, seed, states).to(torch.bfloat16)
    yield "d2t", ids - torch.arange(len(ids), device=device)
    yield "t2d", torch.zeros(shape.vocab, dtype=torch.bool, device=device).index_fill(0, ids, True)


def beside(left: Tensor, factor: float) -> Tensor:
    """[rows, n] -> [rows, 2 n]; the right half, which reads the hidden state, is `factor` times the left half."""
    return torch.cat((left, factor * left), dim=1)


def draft_rows(shape: Shape, drafting: Drafting, seed: int, states: Tensor) -> Tensor:
    """Build the draft's LM head [draft_vocab, hidden] from the hidden-state direction of each draft id."""
    ids = draft_ids(shape, seed)
    # [draft_vocab] index of the draft id that follows each draft id
    following = torch.searchsorted(ids, successor(shape, seed)[ids]).to(states.device)
    wrong = wrong_tokens(shape, drafting, seed).to(states.device)
    # the id after which a row is drafted
    shown = torch.arange(len(ids), device=states.device)
    shown[wrong] = wrong.roll(-1)
    rows = torch.empty_like(states)
    rows[following] = states[shown]
    second = wrong[: round(drafting.second * len(wrong))]
    rows[following[second]] += RUNNER_UP * states[second]
    return rows


def wrong_tokens(shape: Shape, drafting: Drafting, seed: int) -> Tensor:
    """Draft ids after which the head drafts wrongly, in random order; none or at least two."""
    generator = torch.Generator().manual_seed(seed + 3)
    count = round((1 - drafting.acceptance) * shape.draft_vocab)
    return torch.randperm(shape.draft_vocab, generator=generator)[: count if count > 1 else 0]


def write_head(out: Path, shape: Shape, drafting: Drafting, seed: int, device: torch.device) -> None:
    """Write a directory in the form in which EAGLE-3 heads are published: config and one safetensors file."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.cpu().contiguous() for name, tensor in head_tensors(shape, drafting, seed, device)
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(head_config(shape), indent=2))
