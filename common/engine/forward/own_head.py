"""The LM head of a file whose config.json ties it to the embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_directory import real_path
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.safetensors_header import FLOATS
from common.engine.models.checkpoint_layout import CheckpointLayout
from common.errors import ModelError
from common.observability.logs import Log

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED = 4096  # rows at a time


def with_own_head(directory: Path, config: ModelConfig, layout: CheckpointLayout) -> ModelConfig:
    """Return the config with an LM head of its own, as transformers has it, if the file has one that differs.

    The warning names the tensor: vLLM and SGLang use the embedding for such a file. Raises ModelError.
    """
    if not config.tie_word_embeddings:
        return config
    embedding, head = layout.language(EMBEDDING), layout.language(HEAD)
    files = {name: file for file in read_weight_files(directory) for name in file.tensors}
    if embedding not in files or head not in files:
        return config
    entries = [files[name].tensors[name] for name in (embedding, head)]
    expected = (config.vocab_size, config.hidden_size)
    if all(tuple(entry.shape) == expected and entry.dtype in FLOATS for entry in entries):
        paths = [str(real_path(files[name].path)) for name in (embedding, head)]
        try:
            with (
                safe_open(paths[0], framework="pt", device="cpu") as first,
                safe_open(paths[1], framework="pt", device="cpu") as second,
            ):
                if _equal(first.get_slice(embedding), second.get_slice(head), config.vocab_size):
                    return config
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{directory} cannot be read as safetensors: {error}") from error
    Log("weights").warning(
        "config.json ties the LM head to the embedding, but the file has another one, which is used as transformers "
        "does; set tie_word_embeddings to false, or remove the tensor",
        path=str(directory),
        tensor=head,
    )
    return replace(config, tie_word_embeddings=False)


def _equal(one: Any, other: Any, rows: int) -> bool:
    """Return whether two slices of safetensors have the same values."""
    return all(
        torch.equal(one[start : start + COMPARED].float(), other[start : start + COMPARED].float())
        for start in range(0, rows, COMPARED)
    )
