"""Checks that a config's model is in proportion to its weight files, before anything of that size is allocated.

config.json and the weight files both describe the model. Buffers are sized by the config, while the sizes of the
weight files are backed by bytes on disk. Only models that are out of proportion are refused here: one that passes may
still not fit its files, which `load_weights` reports tensor by tensor. Counts are lower bounds (matrices, no biases
or norms).
"""

from __future__ import annotations

from pathlib import Path

import torch

from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_config import EXPERTS, ModelConfig
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.vision_config import VisionConfig
from common.engine.host_memory import GIB, host_memory
from common.errors import ModelError

# A model may have up to twice the values that are stored, and this many more in any case.
PROPORTION, ALWAYS = 2, 1 << 20


def check_model_size(path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Check a complete model. Raises ModelError, even if the memory of a CPU cannot hold it."""
    values = _layers(config) + config.vocab_size * config.hidden_size * (2 - config.tie_word_embeddings)
    sizes = f"{_sizes(config)} and vocab_size {config.vocab_size}"
    _check(path, values, sizes)
    memory = host_memory()
    if device.type == "cpu" and values * dtype.itemsize > memory:
        raise ModelError(
            f"{path / 'config.json'}: {sizes} make weights of {values * dtype.itemsize / GIB:.1f} GiB as {dtype}; this "
            f"machine has {memory / GIB:.1f} GiB"
        )


def check_draft_size(path: Path, draft: DraftConfig) -> None:
    """Check a head or modules that may share embedding and LM head with the target. Raises ModelError."""
    model = draft.model
    own = draft.draft_vocab if draft.draft_vocab is not None and draft.reduced_vocab else 0
    values = _layers(model) + own * model.hidden_size
    _check(path, values, f"{_sizes(model)} and draft_vocab_size {draft.draft_vocab}")


def check_tower_size(path: Path, vision: VisionConfig, hidden: int) -> None:
    """Check the vision part of a language model of width `hidden`. Raises ModelError."""
    values, width, inner, layers = vision.tower_size(hidden)
    sizes = f"vision_config: hidden_size {width}, intermediate_size {inner} and {layers} layers"
    _check(path, values, sizes)


def _layers(config: ModelConfig) -> int:
    return config.hidden_size * sum(
        _mixer_width(config, layer) + 3 * _feed_forward_width(config, layer)
        for layer in range(config.num_layers)
    )


def _mixer_width(config: ModelConfig, layer: int) -> int:
    """Return the rows of a mixer's projections, each of the model's width."""
    shape = config.gated_delta
    if shape is not None and config.kind_of(layer).mixer == "gated_delta":
        return shape.token_values + 2 * shape.inner
    return (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def _feed_forward_width(config: ModelConfig, layer: int) -> int:
    if config.experts is not None and config.kind_of(layer).feed_forward == EXPERTS:
        return config.experts.width
    return config.intermediate_size


def _sizes(config: ModelConfig) -> str:
    return (
        f"num_hidden_layers {config.num_layers}, hidden_size {config.hidden_size}, intermediate_size "
        f"{config.intermediate_size}, {config.num_heads} heads of {config.head_dim}"
        + (f", {config.experts.count} experts of {config.experts.inner}" if config.experts else "")
        + (f", gated delta layers of {config.gated_delta.channels} channels" if config.gated_delta else "")
    )


def _check(path: Path, values: int, sizes: str) -> None:
    stored = sum(file.num_values for file in read_weight_files(path))
    if values > PROPORTION * stored + ALWAYS:
        raise ModelError(
            f"{path / 'config.json'}: {sizes} make a model of at least {values} values; the weight files hold {stored}"
        )
