"""The names of modules in checkpoints of multi-token prediction (MTP, NEXTN), and the inputs of modules. No torch.

There are two published forms, both with a dense decoder layer in each module: DeepSeek's, where module k follows the
target's N layers as layer N + k, and MiMo's, which has a list of its own. They compute the same except for the order
in which a module's projection takes its two inputs. Position 0 is computed like every other. The target's own
checkpoint may contain the modules: then one directory is both the model's and the draft's.

`mtp_chain` is a key of tandem: true if module k reads the output of module k - 1, false if every module reads the
target's hidden state. Its default is true for a DeepSeek checkpoint (arXiv 2412.19437, 2.2) and false for a MiMo one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint.families import FAMILIES
from common.checkpoint.json_fields import MAX_LAYERS, architecture_of, positive, shown
from common.errors import ModelError

MIMO = ("MiMoMTPModel", "MiMoMTP", "MiMoForCausalLM")

# Architecture in config.json -> the family whose decoder layer a module has.
ARCHITECTURES: Mapping[str, str] = {
    **{f"{family}NextN": family for family in FAMILIES},
    **dict.fromkeys(MIMO, "Qwen2ForCausalLM"),
}


MODULES = "num_nextn_predict_layers"
MAX_MODULES = 32  # a draft runs one per step
LISTED = "model.mtp_layers"  # MiMo's list
QWEN_MODULES = "mtp."  # of Qwen3-Next and Qwen3.5, whether or not config.json has a count


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """Names after a module's prefix. Those of its decoder layer are the same in all formats."""

    module: str  # prefix of module k is f"{module}.{first + k}"
    first: int
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding_first: bool  # order of the two inputs of the projection
    chain: bool  # a module reads the output of the previous one; false: the target's hidden state

    def prefix(self, index: int) -> str:
        return f"{self.module}.{self.first + index}"


def has_modules(raw: Mapping[str, Any]) -> bool:
    """Return whether this is the config.json of a model whose checkpoint also contains modules."""
    return architecture_of(raw) in FAMILIES and bool(raw.get(MODULES))


def module_prefixes(raw: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return prefixes of checkpoint names that are not the target's. Raises ModelError for too many modules."""
    family = FAMILIES.get(architecture_of(raw) or "")
    if family is not None and family.gated_delta is not None:
        return (QWEN_MODULES,)
    if not raw.get(MODULES):
        return ()
    count = positive(raw, MODULES, where, most=MAX_MODULES)
    first = positive(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    return (f"{LISTED}.", *(f"model.layers.{first + index}." for index in range(count)))


def mtp_format(raw: Mapping[str, Any], where: str) -> MtpFormat:
    """Read the format from config.json. Raises ModelError for an invalid key."""
    chain = raw.get("mtp_chain")
    if not isinstance(chain, bool | None):
        raise ModelError(f"{where}: mtp_chain must be true or false, found {shown(chain)}")
    if architecture_of(raw) in MIMO:
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        return MtpFormat(LISTED, 0, *names, embedding_first=False, chain=bool(chain))
    first = positive(raw, "num_hidden_layers", where, most=MAX_LAYERS)  # the target's
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return MtpFormat("model.layers", first, *names, embedding_first=True, chain=chain is not False)
