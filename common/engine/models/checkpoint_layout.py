"""Finds the prefixes of language model and vision part in the checkpoint of a model that reads images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import read_tensors
from common.checkpoint.qwen_vl_config import QwenVision
from common.errors import ModelError

NESTED = "model.language_model."  # in the state dict of transformers 5
OTHER_PARTS = tuple(
    f"{prefix}{part}"
    for prefix in ("", "model.")
    for part in (*QwenVision.names.parts, *LlavaVision.names.parts)
)


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
        names = read_tensors(Path(path))
        llava = LlavaVision.names
        for prefix, head in ((NESTED, ""), (llava.prefix, llava.head)):
            if any(name.startswith(prefix) for name in names):
                return CheckpointLayout(prefix, head, OTHER_PARTS)
        return CheckpointLayout(vision_prefixes=OTHER_PARTS)
    if config.vision is None:
        return CheckpointLayout()
    tower = config.vision.names
    published = CheckpointLayout(tower.prefix, tower.head, tower.parts)
    nested = CheckpointLayout(NESTED, "", tuple(f"model.{part}" for part in tower.parts))
    names = read_tensors(Path(path))
    for start, layout in ((tower.mark, published), (NESTED, nested)):
        if any(name.startswith(start) for name in names):
            return layout
    raise ModelError(
        f"{path}: no tensor is called {tower.mark}* or {NESTED}*, as those of {tower.family} checkpoints are"
    )
