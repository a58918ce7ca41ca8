"""Writes and reads the models with experts as published directories: shards with an index, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from deploy.tiny_models import tokenizer as vocabulary
from deploy.tiny_models.checkpoint import generation_config, write_weights
from deploy.tiny_models.language_model import LanguageModel
from deploy.tiny_models.mixture.mtp_head import MtpHead
from deploy.tiny_models.mixture.shapes import Config, Family, new_model

MTP = "mtp."
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def published_name(family: Family, name: str) -> str:
    """Return the checkpoint's name of a tensor of the language model in transformers."""
    return family.prefix + name.removeprefix("model.") if name.startswith("model.") else name


def stored(family: Family, name: str, value: Tensor) -> Tensor:
    """Return a tensor as the checkpoint holds it."""
    kept = value.detach().cpu().contiguous()
    return kept.float() if name.endswith(family.wide or ("\0",)) else kept.bfloat16()


def tensors_of(family: Family, model: LanguageModel, mtp: MtpHead | None) -> dict[str, Tensor]:
    """Return all tensors under their published names."""
    named = {published_name(family, name): value for name, value in model.state_dict().items()}
    if mtp is not None:
        named |= {MTP + name: value for name, value in mtp.state_dict().items()}
    return {name: stored(family, name, value) for name, value in named.items()}


def round_as_stored(family: Family, model: LanguageModel) -> None:
    """Round the weights as the files store them, but keep them in float32, as a CPU node serves them."""
    for name, value in model.state_dict().items():
        value.copy_(stored(family, published_name(family, name), value).float())


def save(
    directory: Path,
    family: Family,
    config: Config,
    model: LanguageModel,
    mtp: MtpHead | None,
    tokenizer: Tokenizer,
) -> None:
    """Write everything except the model card. Raises ValueError if a file is too large to be checked in."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(family, model, mtp)
    places = _shards(tensors)
    for shard in SHARDS:
        chosen = {name: tensors[name] for name, place in places.items() if place == shard}
        write_weights(directory / shard, chosen)
    size = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    for name, content in (
        ("model.safetensors.index.json", index),
        ("config.json", config),
        ("generation_config.json", generation_config(family.text(config))),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    vocabulary.write(tokenizer, directory)


def _shards(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Assign the first half of the bytes to the first shard, and the rest to the second."""
    half = sum(value.nbytes for value in tensors.values()) / 2
    places, filled = {}, 0
    for name, value in tensors.items():
        places[name] = SHARDS[filled >= half]
        filled += value.nbytes
    return places


def load(directory: Path, family: Family) -> tuple[LanguageModel, MtpHead | None]:
    """Read a written directory, in float32 and frozen."""
    config = json.loads((directory / "config.json").read_text())
    tensors = {
        name: value.float() for shard in SHARDS for name, value in load_file(directory / shard).items()
    }
    model = new_model(family, config, seed=0)
    model.load_state_dict({name: tensors.pop(published_name(family, name)) for name in model.state_dict()})
    mtp = MtpHead(family.text(config)) if family.has_mtp else None
    if mtp is not None:
        mtp.load_state_dict({name: tensors.pop(MTP + name) for name in mtp.state_dict()})
    if tensors:
        raise ValueError(f"{directory}: unexpected tensors {sorted(tensors)}")
    for part in (model, mtp):
        if part is not None:
            part.requires_grad_(False)
            part.train(False)
    return model, mtp
