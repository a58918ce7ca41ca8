"""Finds the prefixes of language model and vision part in the checkpoint of a model that reads images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import read_weight_files
from common.checkpoint.qwen_vl_config import QwenVision
from common.errors import ModelError

NESTED = "model.language_model."  # in the state dict of transformers 5
LLAVA = "language_model.model."  # in published checkpoints of LLaVA and those written by save_pretrained
QWEN = "visual."  # in checkpoints of Qwen2.5-VL, whose language model has the prefix of a text-only model
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
OTHER_PARTS = tuple(f"{prefix}{part}" for prefix in ("", "model.") for part in (QWEN, TOWER, PROJECTOR))


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The prefixes of a model's two parts in its checkpoint; the defaults are those of a text-only model."""

    prefix: str = "model."  # before the language model's layers
    head: str = ""  # before lm_head
    # Prefixes of parts that are loaded separately or not at all: the tower, and the projector if it has its own.
    vision_prefixes: tuple[str, ...] = ()

    def language(self, name: str) -> str:
        """Return the name of a language model's tensor, given its name in a text-only checkpoint."""
        if name.startswith("model."):
            return self.prefix + name.removeprefix("model.")
        return self.head + name

    @property
    def language_prefixes(self) -> tuple[str, ...]:
        return (self.prefix, f"{self.head}lm_head.")


def checkpoint_layout(config: ModelConfig, path: str | Path) -> CheckpointLayout:
    """Detect the layout. Reads only headers, and nothing for a model that is published without other parts."""
    if config.text_part and config.vision is None:
        names = _names(path)
        for prefix, head in ((NESTED, ""), (LLAVA, "language_model.")):
            if any(name.startswith(prefix) for name in names):
                return CheckpointLayout(prefix, head, OTHER_PARTS)
        return CheckpointLayout(vision_prefixes=OTHER_PARTS)
    if config.vision is None:
        return CheckpointLayout()
    family, mark = "LLaVA", LLAVA
    published = CheckpointLayout(LLAVA, "language_model.", (TOWER, PROJECTOR))
    nested = CheckpointLayout(NESTED, "", (f"model.{TOWER}", f"model.{PROJECTOR}"))
    if isinstance(config.vision, QwenVision):
        family, mark = "Qwen", QWEN
        published, nested = (
            CheckpointLayout("model.", "", (QWEN,)),
            CheckpointLayout(NESTED, "", (f"model.{QWEN}",)),
        )
    names = _names(path)
    for start, layout in ((mark, published), (NESTED, nested)):
        if any(name.startswith(start) for name in names):
            return layout
    raise ModelError(
        f"{path}: no tensor is called {mark}* or {NESTED}*, as those of {family} checkpoints are"
    )


def _names(path: str | Path) -> list[str]:
    return [name for file in read_weight_files(Path(path)) for name in file.tensors]
