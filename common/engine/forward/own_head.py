"""The LM head of a file: which forms are read, and which one is used if config.json ties it to the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.checkpoint.fp8_weights import Fp8Weights
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_directory import real_path
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.safetensors_header import FLOATS, TensorEntry
from common.checkpoint.weight_formats import DENSE, StoredWeights
from common.engine.models.checkpoint_layout import CheckpointLayout
from common.errors import ModelError
from common.observability.logs import Log

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED = 4096  # rows at a time


def check_head(
    directory: Path, head: str, tensors: Mapping[str, TensorEntry], weights: StoredWeights, remedy: str = ""
) -> None:
    """Check that the file has the LM head `head` as floats, and only its weight. Raises ModelError.

    Args:
        weights: the format; one that is added may store LM heads in another form, which it reads itself.
        remedy: what to do besides storing it so.
    """
    if weights.method != DENSE.method and not isinstance(weights, Fp8Weights):
        return
    stem = head.removesuffix("weight")
    others = sorted(name for name in tensors if name.startswith(stem) and name != head)
    problems = [f"{head} is in {tensors[head].dtype}"] if tensors[head].dtype not in FLOATS else []
    problems += [f"{', '.join(others)} comes with it"] if others else []
    if problems:
        raise ModelError(
            f"{directory}: {' and '.join(problems)}: an LM head is read as one weight in {', '.join(FLOATS)}; store it "
            f"so, without scales or bias{remedy}"
        )


def with_own_head(
    directory: Path, config: ModelConfig, layout: CheckpointLayout
) -> tuple[ModelConfig, Mapping[str, str]]:
    """Return the config, and names of the model's tensors -> names that the file has in their place.

    Where config.json ties the LM head to the embedding, the result is that of transformers: a file with another LM
    head has one of its own, which the warning names, since vLLM and SGLang use the embedding. A file with only one of
    both tensors has it for both.

    Raises ModelError for an LM head in a form that is not read.
    """
    embedding, head = layout.language(EMBEDDING), layout.language(HEAD)
    files = {name: file for file in read_weight_files(directory) for name in file.tensors}
    tensors = {name: file.tensors[name] for name, file in files.items()}
    tied, expected = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
    if head in tensors:
        remove = f", or remove it: {directory / 'config.json'} has tie_word_embeddings true" if tied else ""
        check_head(directory, head, tensors, config.weights, remove)
        if tied and tensors[head].shape != expected:
            raise ModelError(
                f"{directory}: {head} has the shape {list(tensors[head].shape)}, but vocab_size and hidden_size of "
                f"config.json make it {list(expected)}; replace it{remove}"
            )
    if not tied or head not in tensors:
        return config, {}
    if embedding not in tensors:
        return config, {embedding: head}
    if tensors[embedding].shape == expected and tensors[embedding].dtype in FLOATS:
        paths = [str(real_path(files[name].path)) for name in (embedding, head)]
        try:
            with (
                safe_open(paths[0], framework="pt", device="cpu") as first,
                safe_open(paths[1], framework="pt", device="cpu") as second,
            ):
                if _equal(first.get_slice(embedding), second.get_slice(head), config.vocab_size):
                    return config, {}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{directory} cannot be read as safetensors: {error}") from error
    Log("weights").warning(
        "config.json ties the LM head to the embedding, but the file has another one, which is used as transformers "
        "does; set tie_word_embeddings to false, or remove the tensor",
        path=str(directory),
        tensor=head,
    )
    return replace(config, tie_word_embeddings=False), {}


def _equal(one: Any, other: Any, rows: int) -> bool:
    """Return whether two slices of safetensors have the same values."""
    return all(
        torch.equal(one[start : start + COMPARED].float(), other[start : start + COMPARED].float())
        for start in range(0, rows, COMPARED)
    )
