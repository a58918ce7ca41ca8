"""Shared by a constructed target and its draft head: shapes, the embedding and the cycle of the greedy text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPS = 0.05  # scale of o_proj and down_proj
GAP = 20.0  # logit of the next token of the cycle
SPECIAL = 16  # smaller ids are not part of the cycle


@dataclass(frozen=True)
class Shape:
    """The dimensions of the target; the defaults are those of Llama-3.1-8B."""

    vocab: int = 128256
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inter: int = 14336
    max_positions: int = 16384
    draft_vocab: int = 32000  # number of ids that occur in the greedy text

    def __post_init__(self) -> None:
        ordinary = self.vocab - SPECIAL
        if not 0 < self.draft_vocab <= ordinary:
            raise ValueError(
                f"draft_vocab is {self.draft_vocab}; it must be from 1 to {ordinary}, the ordinary ids"
            )

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inter,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


def successor(shape: Shape, seed: int) -> torch.Tensor:
    """[vocab] int64: the greedy successor of each token; a cycle over the draft vocabulary, where all ids lead."""
    generator = torch.Generator().manual_seed(seed)
    order = draft_ids(shape, seed)[torch.randperm(shape.draft_vocab, generator=generator)]
    succ = order[torch.randint(shape.draft_vocab, (shape.vocab,), generator=generator)]
    succ[order] = order.roll(-1)
    return succ


def draft_ids(shape: Shape, seed: int) -> torch.Tensor:
    """[draft_vocab] int64, ascending: the ids that occur in the greedy text. None is special."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(shape.vocab - SPECIAL, generator=generator)[: shape.draft_vocab]
    return ids.sort().values + SPECIAL


def normal(generator: torch.Generator, rows: int, columns: int, scale: float) -> torch.Tensor:
    """Return random values [rows, columns] in bf16 on the generator's device."""
    values = torch.randn(rows, columns, generator=generator, device=generator.device, dtype=torch.float32)
    return values.mul_(scale).to(torch.bfloat16)


def embedding(shape: Shape, seed: int, device: torch.device) -> torch.Tensor:
    """[vocab, hidden] bf16 with rms 1. The values differ between CPU and GPU."""
    return normal(torch.Generator(device).manual_seed(seed), shape.vocab, shape.hidden, 1.0)
