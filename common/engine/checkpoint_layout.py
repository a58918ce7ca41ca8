"""Where the two parts of a LLaVA model stand in its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import ModelError
from common.model_config import ModelConfig
from common.model_files import read_weight_files

PUBLISHED = "language_model.model."  # the layout of published checkpoints and of save_pretrained
NESTED = "model.language_model."  # that of a state dict of transformers 5
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Where the two parts of a model stand in its checkpoint; the defaults are those of text alone."""

    prefix: str = "model."  # of the language model's layers
    head: str = ""  # in front of lm_head
    vision: str = ""  # in front of TOWER and PROJECTOR

    def language(self, name: str) -> str:
        """A tensor of the language model, by the name that it has in a checkpoint of its own."""
        if name.startswith("model."):
            return self.prefix + name.removeprefix("model.")
        return self.head + name

    @property
    def vision_prefixes(self) -> tuple[str, ...]:
        return () if self.prefix == "model." else (self.vision + TOWER, self.vision + PROJECTOR)

    @property
    def language_prefixes(self) -> tuple[str, ...]:
        return (self.prefix, f"{self.head}lm_head.")


def checkpoint_layout(config: ModelConfig, path: str | Path) -> CheckpointLayout:
    """Reads headers alone, and nothing for a model without a vision part."""
    if config.vision is None:
        return CheckpointLayout()
    names = [name for file in read_weight_files(Path(path)) for name in file.tensors]
    if any(name.startswith(PUBLISHED) for name in names):
        return CheckpointLayout(PUBLISHED, "language_model.")
    if any(name.startswith(NESTED) for name in names):
        return CheckpointLayout(NESTED, "", "model.")
    raise ModelError(
        f"{path}: no tensor is called {PUBLISHED}* or {NESTED}*, as those of LLaVA checkpoints are"
    )
