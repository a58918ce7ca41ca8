"""Builds a large model with random weights and a known greedy text, for benchmarks without downloads.

    python -m deploy.tiny_models.constructed OUT --device cuda --seed 0 [--layers 32 --hidden 4096 ...]
    python -m deploy.tiny_models.constructed OUT --device cuda --seed 0 --draft DRAFT --acceptance 0.8
    python -m deploy.tiny_models.constructed OUT --device cuda --seed 0 --config CONFIG_JSON --module --acceptance 0.8

It is a Llama of the given sizes, or has the family and the sizes of a config.json. Greedy text is one random cycle over
`draft_vocab` ordinary token ids, whatever the precision or the kernels, and never ends; every other id leads into it
(`constructed_tensors`). The weights are derived from the seed and are not meant to be stored. `--draft` adds an EAGLE-3
head with a known acceptance rate (`constructed_head`); `--module` adds a module of multi-token prediction to the
checkpoint (`constructed_module`), which then is the model's and the draft's directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from common.checkpoint.draft_config import DraftConfig, with_steps
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import read_json
from common.checkpoint.mtp_format import has_modules
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.models.model_registry import build_model
from common.engine.models.mtp import build_mtp
from common.errors import ModelError
from common.speculation.table import algorithm
from deploy.tiny_models.constructed_head import Drafting, write_head
from deploy.tiny_models.constructed_module import ModuleTensors
from deploy.tiny_models.constructed_shape import Shape
from deploy.tiny_models.constructed_tensors import (
    Make,
    TargetTensors,
    shape_of,
    stacks_experts,
    stored_pieces,
)
from deploy.tiny_models.shards import Stored, write_shards

TOKENIZER = Path(__file__).parent / "tiny-target"
META = Placement(torch.bfloat16, torch.device("meta"))


def write(
    out: Path,
    raw: Mapping[str, object],
    draft_vocab: int,
    seed: int,
    device: torch.device,
    module: Drafting | None = None,
) -> Shape:
    """Write a standard Hugging Face directory: config, sharded safetensors, index and tokenizer.

    Args:
        raw: the content of config.json.
        draft_vocab: number of ids that occur in the greedy text.
        module: the checkpoint also has a module of multi-token prediction that drafts so.

    Raises:
        ModelError: the model is not supported, or its checkpoints have no module.
        ValueError: its text or its module cannot be chosen.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(dict(raw), indent=2))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1]}))
    config = ModelConfig.load(out)
    if config.vision is not None:
        raise ValueError("a model that reads images cannot be constructed: use the config of its text part")
    shape = shape_of(config, draft_vocab)
    write_shards(out, list(_stored(out, config, shape, seed, device, module)), device)
    (out / "tokenizer.json").write_text(json.dumps(tokenizer(shape.vocab)))
    shutil.copy(TOKENIZER / "tokenizer_config.json", out / "tokenizer_config.json")
    return shape


def _stored(
    out: Path, config: ModelConfig, shape: Shape, seed: int, device: torch.device, module: Drafting | None
) -> Iterator[Stored]:
    """Yield every tensor of the checkpoint; pieces of models without storage say which there are."""
    make = TargetTensors(config, shape, seed, device, module)
    model, stacked = build_model(config, META), stacks_experts(config)
    yield from _made(stored_pieces(model.pieces(), stacked), make)
    if module is not None:
        draft = _module_config(out / "config.json", config)
        pieces = build_mtp(draft, model, META).pieces()
        yield from _made(stored_pieces(pieces, stacked), ModuleTensors(draft, make))


def _module_config(file: Path, config: ModelConfig) -> DraftConfig:
    """Read the config of the module that the checkpoint is going to have."""
    directory = algorithm("mtp").directory
    assert directory is not None
    raw = read_json(file)
    if not has_modules(raw):
        raise ValueError(f"checkpoints of {config.architecture} with this config have no module")
    return with_steps(directory.read(directory.flatten(raw, str(file)), file, config), 1)


def _made(pieces: Iterable[Piece], make: Make) -> Iterator[Stored]:
    """Yield the tensors that the pieces read, each once."""
    for name, piece in {piece.name: piece for piece in pieces}.items():
        dtype = torch.float32 if name.endswith("A_log") else torch.bfloat16
        yield Stored(name, piece.whole, dtype, lambda piece=piece: make(piece))  # type: ignore[misc]


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
    parser = _parser()
    given = vars(parser.parse_args())
    out, device, seed = given.pop("out"), torch.device(given.pop("device")), given.pop("seed")
    draft, module, file = given.pop("draft"), given.pop("module"), given.pop("config")
    drafting = Drafting(given.pop("acceptance"), given.pop("second"))
    sizes = {name: value for name, value in given.items() if value is not None}
    if draft is not None and module:
        parser.error("--draft and --module cannot be combined: a module needs marks in the embedding")
    if file is not None and sizes.keys() - {"draft_vocab"}:
        parser.error("--config already says the sizes")
    raw = json.loads(file.read_text()) if file is not None else Shape(**sizes).config()
    vocab = sizes.get("draft_vocab", Shape.draft_vocab)
    try:
        shape = write(out, raw, vocab, seed, device, drafting if module else None)
    except (ModelError, ValueError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    if draft is not None:
        write_head(draft, shape, drafting, seed, device)


def _parser() -> argparse.ArgumentParser:
    default = Shape()
    parser = argparse.ArgumentParser(description="build a large model with random weights")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--config", type=Path, help="config.json of another family, instead of a Llama's sizes"
    )
    parser.add_argument("--draft", type=Path, help="also write an EAGLE-3 head for it to this directory")
    parser.add_argument("--module", action="store_true", help="also write a module of multi-token prediction")
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="share of tokens that either drafts correctly"
    )
    parser.add_argument(
        "--second",
        type=float,
        default=0.5,
        help="share of the other tokens for which the head ranks the correct one second",
    )
    for name in (field.name for field in fields(Shape)):
        shown = f"default {getattr(default, name)}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=shown)
    return parser


if __name__ == "__main__":
    main()
