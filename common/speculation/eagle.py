"""`eagle`: EAGLE-1 and EAGLE-2 heads, which read the target's last hidden state and share its embedding and head."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_config import ModelConfig
from common.speculation.algorithm import Algorithm, DraftDirectory, Json
from common.speculation.head import head_model
from common.speculation.head_tensors import holds_eagle


def _read(raw: Json, file: Path, target: ModelConfig) -> DraftConfig:
    model, width = head_model(raw, file, target)
    return DraftConfig("eagle", model, width, AuxLayers(), None, False)


EAGLE = Algorithm(
    name="eagle",
    directory=DraftDirectory(
        architectures=("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
        read=_read,
        model="common.node.loaded_draft:load_eagle_head",
        holds=holds_eagle,
        takes_embeds=True,
    ),
    trees=True,
    adaptive=True,
)
