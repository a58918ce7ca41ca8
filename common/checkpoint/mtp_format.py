"""How checkpoints of multi-token prediction (MTP, NEXTN) name their modules, and what the modules read. No torch.

Two published forms, both with a dense decoder layer in each module: DeepSeek's, where module k stands behind the
target's layers as layer N + k, and MiMo's, which has its own list. They agree in what is computed but for the order in
which a module's projection takes its two inputs. Position 0 is computed like every other. Modules may stand in the
target's own checkpoint: the same directory is then the model's and the draft's.

`mtp_chain` is our key: true if module k reads what module k - 1 gives, false if every module reads the target's hidden
state. Without it a DeepSeek checkpoint is a chain (arXiv 2412.19437, 2.2) and a MiMo one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint.json_fields import MAX_LAYERS, architecture_of, positive, shown
from common.checkpoint.model_config import FAMILIES
from common.errors import ModelError

MIMO = ("MiMoMTPModel", "MiMoMTP", "MiMoForCausalLM")

# architecture in config.json -> the family whose decoder layer a module has
ARCHITECTURES: Mapping[str, str] = {
    **{f"{family}NextN": family for family in FAMILIES},
    **dict.fromkeys(MIMO, "Qwen2ForCausalLM"),
}


MODULES = "num_nextn_predict_layers"
MAX_MODULES = 32  # of which a draft runs one per step
LISTED = "model.mtp_layers"  # MiMo's list


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """Names below a module's prefix. Those of its decoder layer are the same everywhere."""

    module: str  # prefix of module k is f"{module}.{first + k}"
    first: int
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding_first: bool  # of the two inputs of the projection
    chain: bool  # a module reads the output of the one before; false: the target's hidden state

    def prefix(self, index: int) -> str:
        return f"{self.module}.{self.first + index}"


def has_modules(raw: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of a model whose checkpoint holds modules, too."""
    return architecture_of(raw) in FAMILIES and bool(raw.get(MODULES))


def module_prefixes(raw: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Names in a checkpoint that are none of the target's. Raises ModelError for an absurd number of modules."""
    if not raw.get(MODULES):
        return ()
    count = positive(raw, MODULES, where, most=MAX_MODULES)
    first = positive(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    return (f"{LISTED}.", *(f"model.layers.{first + index}." for index in range(count)))


def mtp_format(raw: Mapping[str, Any], where: str) -> MtpFormat:
    """From config.json. `ModelError` where a key is not what it must be."""
    chain = raw.get("mtp_chain")
    if not isinstance(chain, bool | None):
        raise ModelError(f"{where}: mtp_chain must be true or false, found {shown(chain)}")
    if architecture_of(raw) in MIMO:
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        return MtpFormat(LISTED, 0, *names, embedding_first=False, chain=bool(chain))
    first = positive(raw, "num_hidden_layers", where, most=MAX_LAYERS)  # the target's
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return MtpFormat("model.layers", first, *names, embedding_first=True, chain=chain is not False)
