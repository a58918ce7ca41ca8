"""`mtp`: multi-token prediction (others call it NEXTN), one module for every step or several with a step each."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig, check_same
from common.checkpoint.json_fields import MAX_WIDTH, architecture_of, positive
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import ARCHITECTURES, MAX_MODULES, MODULES, has_modules, mtp_format
from common.speculation.algorithm import Algorithm, DraftDirectory, Json


def _fits(name: str, raw: Json) -> bool:
    """Return whether this is the checkpoint of a target that contains prediction modules."""
    return has_modules(raw)


def _read(raw: Json, file: Path, target: ModelConfig) -> DraftConfig:
    """Read the config with the number of modules as number of layers, since config.json has the target's layers."""
    name = str(architecture_of(raw))
    modules = positive(raw, MODULES, str(file), most=MAX_MODULES)
    own = {"num_hidden_layers": modules, "layer_types": None}
    family = ARCHITECTURES.get(name, name)
    model = ModelConfig.parse({**raw, "architectures": [family], **own}, file.parent)
    check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
    check_same(file, "hidden_size", model.hidden_size, target.hidden_size)
    width = positive(raw, "target_hidden_size", str(file), target.hidden_size, MAX_WIDTH)
    check_same(file, "target_hidden_size", width, target.hidden_size)
    return DraftConfig("mtp", model, width, AuxLayers(), None, False, mtp_format(raw, str(file)))


def _most_steps(raw: Json, where: str) -> int | None:
    modules = positive(raw, MODULES, where, most=MAX_MODULES)
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
