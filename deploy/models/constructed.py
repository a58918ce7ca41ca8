"""A large Llama with random weights and a greedy text known in advance: for benchmarks where nothing can be downloaded.

    python -m deploy.models.constructed OUT --device cuda --seed 0 [--layers 32 --hidden 4096 ...]

Construction: embeddings are random with rms 1; every o_proj and down_proj is scaled by a small eps, so the residual
stream stays close to the embedding while all matrix products have full size; one random cycle succ(t) runs over the
ordinary token ids, and the LM head row of succ(t) is E[t] * gap / hidden. Greedy text follows the cycle whatever the
precision or the kernels, and never ends. The weights are made from the seed and not meant to be stored.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

EPS = 0.05  # of o_proj and down_proj
GAP = 20.0  # logit of the next token of the cycle
SPECIAL = 16  # ids below are not part of the cycle
SHARD_BYTES = 4 << 30
TOKENIZER = Path(__file__).parent / "tiny-target"


@dataclass(frozen=True)
class Shape:
    """Llama-3.1-8B unless told otherwise."""

    vocab: int = 128256
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inter: int = 14336
    max_positions: int = 16384

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
    """[vocab] int64: the greedy token after each token; one cycle over all ids but the special ones."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(shape.vocab - SPECIAL, generator=generator) + SPECIAL
    succ = torch.arange(shape.vocab)
    succ[order] = order.roll(-1)
    succ[:SPECIAL] = order[:SPECIAL]
    return succ


def tensors(shape: Shape, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, bf16 tensor on `device`) of every weight, in the order of the layers."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(scale).to(torch.bfloat16)

    hidden, width = shape.hidden, shape.heads * shape.head_dim
    embedding = normal(shape.vocab, hidden, 1.0)
    yield "model.embed_tokens.weight", embedding
    ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        scale = 1 / math.sqrt(hidden)
        yield f"{prefix}.input_layernorm.weight", ones.clone()
        yield f"{prefix}.post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}.self_attn.q_proj.weight", normal(width, hidden, scale)
        yield f"{prefix}.self_attn.k_proj.weight", normal(shape.kv_heads * shape.head_dim, hidden, scale)
        yield f"{prefix}.self_attn.v_proj.weight", normal(shape.kv_heads * shape.head_dim, hidden, scale)
        yield f"{prefix}.self_attn.o_proj.weight", normal(hidden, width, EPS / math.sqrt(width))
        yield f"{prefix}.mlp.gate_proj.weight", normal(shape.inter, hidden, scale)
        yield f"{prefix}.mlp.up_proj.weight", normal(shape.inter, hidden, scale)
        yield f"{prefix}.mlp.down_proj.weight", normal(hidden, shape.inter, EPS / math.sqrt(shape.inter))
    yield "model.norm.weight", ones
    head = torch.zeros(shape.vocab, hidden, dtype=torch.bfloat16, device=device)
    succ = successor(shape, seed).to(device)
    head[succ] = embedding * (GAP / hidden)
    yield "lm_head.weight", head


def write(out: Path, shape: Shape, seed: int, device: torch.device) -> None:
    """An ordinary Hugging Face directory: config, sharded safetensors, index and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            save_file(shard, out / f"model-{len(shards):05d}.safetensors", metadata={"format": "pt"})
            shards.append(list(shard))
            shard, size = {}, 0

    for name, tensor in tensors(shape, seed, device):
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    weights = {name: f"model-{index:05d}.safetensors" for index, names in enumerate(shards) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(shape.config(), indent=2))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1]}))
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(shape.vocab)))
    shutil.copy(TOKENIZER / "tokenizer_config.json", out / "tokenizer_config.json")


def tokenizer(vocab: int) -> dict[str, Any]:
    """The tiny target's, with a word for each id that it does not know.

    Prompts are sent as token ids, but a token without text makes no event of a stream: gaps between events would
    then say nothing of gaps between tokens.
    """
    described: dict[str, Any] = json.loads((TOKENIZER / "tokenizer.json").read_text())
    words = described["model"]["vocab"]
    words.update({f"\u0120t{token_id}": token_id for token_id in range(len(words), vocab)})
    return described


def main() -> None:
    default = Shape()
    parser = argparse.ArgumentParser(description="build a large Llama with random weights")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "inter", "max_positions"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    given = vars(parser.parse_args())
    out, device, seed = given.pop("out"), torch.device(given.pop("device")), given.pop("seed")
    write(out, Shape(**given), seed, device)


if __name__ == "__main__":
    main()
