"""`standalone`: a small language model that reads the same text and uses no part of the target."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.families import FAMILIES
from common.checkpoint.model_config import ModelConfig
from common.speculation.algorithm import Algorithm, DraftDirectory, Json
from common.speculation.shared_tokens import check_same_tokens


def _read(raw: Json, file: Path, target: ModelConfig) -> DraftConfig:
    model = ModelConfig.load(file.parent)
    return DraftConfig("standalone", model, 0, AuxLayers(), None, False)


STANDALONE = Algorithm(
    name="standalone",
    other_names=("draft_model",),
    directory=DraftDirectory(
        # Any model that can be served, whose tokens are the target's. The view follows families that are added later.
        architectures=FAMILIES.keys(),
        read=_read,
        model="common.node.loaded_draft:load_language_model",
        compare=check_same_tokens,
    ),
    adaptive=True,
)
