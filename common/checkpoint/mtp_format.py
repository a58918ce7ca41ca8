"""The names of modules in checkpoints of multi-token prediction (MTP, NEXTN), and the inputs of modules. No torch.

Each module has one decoder layer. The published forms differ in names, and in the order in which a module's projection
takes its two inputs:

    DeepSeek, GLM         model.layers.{N + k}.*, after the target's N layers
    MiMo                  model.mtp_layers.{k}.*
    MiMo-V2               model.mtp.layers.{k}.*, see mimo_v2_modules.py
    Qwen3-Next, Qwen3.5   mtp.*; module k has the layer mtp.layers.{k}.*, everything else is shared by all modules

The layer is one of the target's family with full attention, except in MiMo-V2. Position 0 is computed like every
other. The target's own checkpoint may contain the modules: then one directory is both the model's and the draft's.

`mtp_chain` is a key of tandem: true if module k reads the output of module k - 1, false if every module reads the
target's hidden state. Its default is false for MiMo and MiMo-V2, and true for the other forms (arXiv 2412.19437, 2.2).
A single module runs at every step, and reads its own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint import mimo_v2_modules
from common.checkpoint.families import FAMILIES, Family
from common.checkpoint.json_fields import MAX_LAYERS, architecture_of, positive, shown
from common.checkpoint.layer_norms import PRE_NORM
from common.checkpoint.mimo_v2_modules import MIMO_V2, mimo_v2_count
from common.checkpoint.model_files import read_json
from common.checkpoint.text_part import text_part
from common.errors import ModelError

MIMO = "MiMoForCausalLM"

# The layer of a module has norms before its blocks, as in all published forms.
WITH_MODULES = tuple(family for family in FAMILIES.values() if family.layer_norms == PRE_NORM)
# Architecture in config.json of a directory of its own -> the family whose decoder layer a module has.
ARCHITECTURES: Mapping[str, str] = {
    **{f"{name}NextN": name for name, family in FAMILIES.items() if family in WITH_MODULES},
    **dict.fromkeys(("MiMoMTPModel", "MiMoMTP"), MIMO),
    **{name: name for name in MIMO_V2},
}

MODULES = "num_nextn_predict_layers"
QWEN_COUNT = "mtp_num_hidden_layers"  # Qwen3-Next has none, and one module
MAX_MODULES = 32  # a draft runs one per step
LISTED = "model.mtp_layers"  # MiMo's list
QWEN_MODULES = "mtp"  # in Qwen3-Next and Qwen3.5, whether or not config.json has a count
POST_ATTENTION = "post_attention_layernorm"  # the name of the norm before the feed-forward in most forms


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """Names after a module's prefix. Those of its decoder layer are the same in all formats, but for one norm."""

    module: str  # prefix of module k is f"{module}.{first + k}", or `module` if all parts but the layers are shared
    first: int | None
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding_first: bool  # order of the two inputs of the projection
    chain: bool  # a module reads the output of the previous one; false: the target's hidden state
    before_norm: bool = False  # hidden states are those before the final norm, of the target and of modules
    feed_forward_norm: str = POST_ATTENTION

    @property
    def shared(self) -> bool:
        """True if all modules have the same norms and projection around their decoder layers."""
        return self.first is None

    def prefix(self, index: int) -> str:
        return self.module if self.first is None else f"{self.module}.{self.first + index}"

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the decoder layer of module `index`."""
        return f"{self.module}.layers.{index}" if self.shared else self.prefix(index)

    def layer_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of a decoder layer."""
        return name.replace(f".{POST_ATTENTION}.", f".{self.feed_forward_norm}.")


def has_modules(raw: Mapping[str, Any]) -> bool:
    """Return whether this is the config.json of a model whose checkpoint also contains modules."""
    family = FAMILIES.get(architecture_of(raw) or "")
    return family in WITH_MODULES and (_has_qwen_form(family) or bool(raw.get(MODULES)))


def has_qwen_form(raw: Mapping[str, Any]) -> bool:
    """Return whether the modules have the names of Qwen3-Next and Qwen3.5."""
    return _has_qwen_form(FAMILIES.get(_module_family(raw)))


def has_mimo_v2_form(raw: Mapping[str, Any]) -> bool:
    """Return whether the modules have the names and the attention of MiMo-V2."""
    return architecture_of(raw) in MIMO_V2


def module_count(raw: Mapping[str, Any], directory: Path) -> int:
    """Return the number of modules in the checkpoint. Raises ModelError if it is not supported."""
    if has_mimo_v2_form(raw):
        return mimo_v2_count(directory, MAX_MODULES)
    where = str(directory / "config.json")
    family = FAMILIES[_module_family(raw)]
    flat = text_part(raw, where) if family.text_part else raw
    if _has_qwen_form(family):
        return positive(flat, QWEN_COUNT, where, 1, MAX_MODULES)
    return positive(flat, MODULES, where, most=MAX_MODULES)


def module_config(raw: Mapping[str, Any], count: int, where: str) -> dict[str, Any]:
    """Return the config.json of a model whose layers are those of `count` modules of the target's family.

    config.json itself has the target's layers. Raises ModelError.
    """
    architecture = _module_family(raw)
    family = FAMILIES[architecture]
    flat = text_part(raw, where) if family.text_part else dict(raw)
    full = ["full_attention"] * count if family.gated_delta is not None else None
    # All modules have experts if the target has them.
    experts = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
    own = {"architectures": [architecture], "num_hidden_layers": count, "layer_types": full, **experts}
    return {**flat, **own}


def module_prefixes(directory: Path) -> tuple[str, ...]:
    """Return prefixes of a checkpoint's names that are not the target's. Raises ModelError for too many modules."""
    file = directory / "config.json"
    raw, where = read_json(file), str(file)
    family = FAMILIES.get(architecture_of(raw) or "")
    if family is not None and _has_qwen_form(family):
        return (f"{QWEN_MODULES}.",)
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
    if has_mimo_v2_form(raw):
        names = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        return MtpFormat(
            mimo_v2_modules.LISTED,
            0,
            *names,
            embedding_first=True,
            chain=bool(chain),
            before_norm=True,
            feed_forward_norm="pre_mlp_layernorm",
        )
    if has_qwen_form(raw):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return MtpFormat(QWEN_MODULES, None, *names, embedding_first=True, chain=chain is not False)
    if _module_family(raw) == MIMO:
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        return MtpFormat(LISTED, 0, *names, embedding_first=False, chain=bool(chain))
    first = positive(raw, "num_hidden_layers", where, most=MAX_LAYERS)  # the target's
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return MtpFormat("model.layers", first, *names, embedding_first=True, chain=chain is not False)


def _module_family(raw: Mapping[str, Any]) -> str:
    """Return the family whose decoder layer the modules have."""
    name = str(architecture_of(raw))
    return ARCHITECTURES.get(name, name)


def _has_qwen_form(family: Family | None) -> bool:
    return family is not None and family.gated_delta is not None
