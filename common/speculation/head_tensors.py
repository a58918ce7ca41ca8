"""Recognises draft heads by the names of their tensors, since config.json often has the name of the target's family.

Also says which forms of drafts are not supported, each by its name. No torch.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from common.checkpoint.json_fields import architecture_of
from common.checkpoint.model_files import foreign_weights, read_tensors, weight_paths
from common.errors import ModelError
from common.speculation.algorithm import Json

PREFIX = "model."  # some files have it before every name
FUSION = "fc.weight"  # joins the two inputs of a head
MLA = "self_attn.kv_a_proj_with_mqa.weight"
EXPERTS = ".mlp.experts."


def tensor_names(directory: Path) -> frozenset[str]:
    """Return the names of all tensors, without `model.` before them. Raises ModelError if there are no weights."""
    return frozenset(name.removeprefix(PREFIX) for name in read_tensors(directory))


def names_if_present(directory: Path) -> frozenset[str]:
    """Return the same, or nothing for a directory whose weights have not been downloaded yet.

    Raises ModelError for weights in another format.
    """
    try:
        weight_paths(directory)
    except ModelError:
        if foreign_weights(directory):
            raise
        return frozenset()
    return tensor_names(directory)


def holds_eagle3(names: Collection[str]) -> bool:
    """Return whether these are the tensors of an EAGLE-3 head: the first layer norms the target's hidden state."""
    marks = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "d2t")
    return FUSION in names and any(mark in names for mark in marks)


def holds_eagle(names: Collection[str]) -> bool:
    """Return whether these are the tensors of an EAGLE-1 or EAGLE-2 head: a layer without a norm before attention."""
    layer = "layers.0.self_attn.o_proj.weight" in names and "layers.0.input_layernorm.weight" not in names
    return FUSION in names and layer and not holds_eagle3(names)


def check_form(raw: Json, names: Collection[str], where: str) -> None:
    """Raise ModelError, which begins with `where`, for a form of draft that is known and not supported."""
    stated = f"{architecture_of(raw) or ''} {raw.get('speculators_model_type') or ''}".lower()
    form = None
    if "dspark" in stated or any(name.startswith("markov_head.") for name in names):
        form = "a DSpark draft, which proposes a block of tokens in one forward and links them with a Markov head"
    elif "dflash" in stated or "dflash_config" in raw:
        form = (
            "a DFlash draft, which proposes a block of tokens in one forward that attends in both directions"
        )
    elif "peagle" in stated.replace("-", "").replace("_", "") or "mask_hidden" in names:
        form = "a P-EAGLE head, which proposes all of its tokens in one forward from masked hidden states"
    elif FUSION in names and any(name.endswith(MLA) for name in names):
        form = "an EAGLE head with latent attention (MLA), whose keys and values have another layout"
    elif FUSION in names and any(EXPERTS in name for name in names):
        form = "an EAGLE head with a mixture of experts in the place of its feed-forward"
    if form is not None:
        raise ModelError(
            f"{where}: this is {form}; it is not supported. Use an EAGLE, EAGLE-3 or MTP draft, or "
            "speculation.algorithm ngram"
        )
