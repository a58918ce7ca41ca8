"""Builds a large Llama with random weights and a known greedy text, for benchmarks without downloads.

    python -m deploy.tiny_models.constructed OUT --device cuda --seed 0 [--layers 32 --hidden 4096 ...]
    python -m deploy.tiny_models.constructed OUT --device cuda --seed 0 --draft DRAFT --acceptance 0.8

Construction: embeddings are random with rms 1. Every o_proj and down_proj is scaled by a small eps, so the residual
stream stays close to the embedding while all matrix products keep their full size. One random cycle succ(t) runs over
`draft_vocab` ordinary token ids, and every other id leads into it. The LM head row of succ(t) is E[t] * gap / hidden.
Greedy text follows the cycle whatever the precision or the kernels, and never ends. The weights are derived from the
seed and are not meant to be stored. `--draft` adds an EAGLE-3 head with a known acceptance rate: see
`constructed_head`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deploy.tiny_models.constructed_head import Drafting, write_head
from deploy.tiny_models.constructed_shape import EPS, GAP, Shape, embedding, normal, successor

SHARD_BYTES = 4 << 30
TOKENIZER = Path(__file__).parent / "tiny-target"


def tensors(shape: Shape, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, bf16 tensor on `device`) of every weight, layer by layer."""
    random = partial(normal, torch.Generator(device).manual_seed(seed + 1))
    hidden, width, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    embeds = embedding(shape, seed, device)
    yield "model.embed_tokens.weight", embeds
    ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        scale = 1 / math.sqrt(hidden)
        yield f"{prefix}.input_layernorm.weight", ones.clone()
        yield f"{prefix}.post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}.self_attn.q_proj.weight", random(width, hidden, scale)
        yield f"{prefix}.self_attn.k_proj.weight", random(kv, hidden, scale)
        yield f"{prefix}.self_attn.v_proj.weight", random(kv, hidden, scale)
        yield f"{prefix}.self_attn.o_proj.weight", random(hidden, width, EPS / math.sqrt(width))
        yield f"{prefix}.mlp.gate_proj.weight", random(shape.inter, hidden, scale)
        yield f"{prefix}.mlp.up_proj.weight", random(shape.inter, hidden, scale)
        yield f"{prefix}.mlp.down_proj.weight", random(hidden, shape.inter, EPS / math.sqrt(shape.inter))
    yield "model.norm.weight", ones
    head = torch.zeros(shape.vocab, hidden, dtype=torch.bfloat16, device=device)
    # Several ids may have the same successor.
    head.index_add_(0, successor(shape, seed).to(device), embeds * (GAP / hidden))
    yield "lm_head.weight", head


def write(out: Path, shape: Shape, seed: int, device: torch.device) -> None:
    """Write a standard Hugging Face directory: config, sharded safetensors, index and tokenizer."""
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
    """Return the tiny target's tokenizer, extended by a word for each further id.

    Prompts are sent as token ids, but a token without text produces no stream event, and then gaps between events would
    not measure gaps between tokens.
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
    parser.add_argument("--draft", type=Path, help="also write an EAGLE-3 head for it to this directory")
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="share of tokens that it drafts correctly"
    )
    parser.add_argument(
        "--second",
        type=float,
        default=0.5,
        help="share of the other tokens for which it ranks the correct one second",
    )
    for name in (field.name for field in fields(Shape)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    given = vars(parser.parse_args())
    out, device, seed = given.pop("out"), torch.device(given.pop("device")), given.pop("seed")
    draft, drafting = given.pop("draft"), Drafting(given.pop("acceptance"), given.pop("second"))
    shape = Shape(**given)
    write(out, shape, seed, device)
    if draft is not None:
        write_head(draft, shape, drafting, seed, device)


if __name__ == "__main__":
    main()
