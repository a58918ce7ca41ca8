"""`mtp`: multi-token prediction (others call it NEXTN), one module for every step or several with a step each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig, check_same
from common.checkpoint.json_fields import MAX_WIDTH, positive
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import ARCHITECTURES, has_modules, has_qwen_form, module_config, mtp_format
from common.speculation.algorithm import Algorithm, DraftDirectory, Json
from common.speculation.head import check_positions


def _fits(name: str, raw: Json) -> bool:
    """Return whether this is the checkpoint of a target that contains prediction modules."""
    return has_modules(raw)


def _read(raw: Json, file: Path, target: ModelConfig) -> DraftConfig:
    """Read the config; the draft's layers are the modules."""
    own, modules = module_config(raw, str(file))
    model = ModelConfig.parse(own, file.parent)
    check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
    width = positive(raw, "target_hidden_size", str(file), target.hidden_size, MAX_WIDTH)
    check_same(file, "target_hidden_size", width, target.hidden_size)
    if raw.get("target_hidden_size") is None or modules == 1:
        # A single module reads its own output in the place of the target's.
        check_same(file, "hidden_size", model.hidden_size, target.hidden_size)
    if has_qwen_form(raw):
        # Its own file is the target's, whose axes the text part leaves out.
        axes = target.rope
        rope = replace(model.rope, sections=axes.sections, interleaved=axes.interleaved)
        model = replace(model, rope=rope)
    check_positions(file, model, target)
    return DraftConfig("mtp", model, width, AuxLayers(), None, False, mtp_format(raw, str(file)))


def _most_steps(raw: Json, where: str) -> int | None:
    modules = module_config(raw, where)[1]
    return modules if modules > 1 else None


def _slots(steps: int, topk: int, nodes: int) -> int:
    """The last module runs over the verified rows and as many rows before them as it has predecessors."""
    return max(nodes, 2 * steps)


MTP = Algorithm(
    name="mtp",
    other_names=("nextn",),
    directory=DraftDirectory(
        architectures=tuple(ARCHITECTURES),
        read=_read,
        model="common.node.loaded_draft:load_modules",
        fits=_fits,
        most_steps=_most_steps,
    ),
    slots=_slots,
)
