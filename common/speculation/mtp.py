"""`mtp`: multi-token prediction (others call it NEXTN), one module for every step or several with a step each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig, check_same
from common.checkpoint.json_fields import MAX_WIDTH, positive
from common.checkpoint.mimo_v2_modules import mimo_v2_layers
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import (
    ARCHITECTURES,
    has_mimo_v2_form,
    has_modules,
    module_config,
    module_count,
    mtp_format,
)
from common.speculation.algorithm import Algorithm, DraftDirectory, Json
from common.speculation.head import check_positions


def _fits(name: str, raw: Json) -> bool:
    """Return whether this is the checkpoint of a target that contains prediction modules."""
    return has_modules(raw)


def _read(raw: Json, file: Path, target: ModelConfig) -> DraftConfig:
    """Read the config; the draft's layers are the modules."""
    form = mtp_format(raw, str(file))
    model = _layers(raw, file)
    check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
    width = positive(raw, "target_hidden_size", str(file), target.hidden_size, MAX_WIDTH)
    check_same(file, "target_hidden_size", width, target.hidden_size)
    if raw.get("target_hidden_size") is None or model.num_layers == 1 or form.shared:
        # A single module reads its own output in the place of the target's, and so do modules with one projection.
        check_same(file, "hidden_size", model.hidden_size, target.hidden_size)
    if form.shared:
        # Its own file is the target's, whose axes the text part leaves out.
        axes = target.rope
        rope = replace(model.rope, sections=axes.sections, interleaved=axes.interleaved)
        model = replace(model, rope=rope)
    check_positions(file, model, target)
    aux = AuxLayers((target.num_layers,)) if form.before_norm else AuxLayers()
    return DraftConfig("mtp", model, width, aux, None, False, form)


def _layers(raw: Json, file: Path) -> ModelConfig:
    """Return the config of a model whose layers are those of the modules."""
    count = module_count(raw, file.parent)
    if has_mimo_v2_form(raw):
        return mimo_v2_layers(raw, file.parent, count)
    return ModelConfig.parse(module_config(raw, count, str(file)), file.parent)


def _max_steps(raw: Json, file: Path) -> int | None:
    modules = module_count(raw, file.parent)
    return modules if modules > 1 else None


def _slots(steps: int, topk: int, nodes: int) -> int:
    """Return the rows of the last module: the verified ones, and as many before them as it has predecessors."""
    return max(nodes, 2 * steps)


MTP = Algorithm(
    name="mtp",
    other_names=("nextn",),
    directory=DraftDirectory(
        architectures=tuple(ARCHITECTURES),
        read=_read,
        model="common.node.loaded_draft:load_modules",
        fits=_fits,
        max_steps=_max_steps,
    ),
    slots=_slots,
)
