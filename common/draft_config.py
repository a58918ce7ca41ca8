"""What a draft model's directory says, read beside the target's config. No torch.

The widths of everything that passes between target and draft come from two functions here and from nowhere else:
`target_width` (what the target gives per token) and `hidden_size_for` (what one draft step gives to the next). The
engine asks them through the types that have those widths (common/engine/forward/draft_inputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common import model_files
from common.errors import ModelError
from common.model_config import FAMILIES, ModelConfig

DraftAlgorithm = Literal["eagle3", "eagle", "standalone"]

ARCHITECTURES: Mapping[DraftAlgorithm, tuple[str, ...]] = {
    "eagle3": (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
    ),
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "standalone": tuple(FAMILIES),  # any model that could be served, with the same vocabulary
}
REFUSED = (
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)  # options of some EAGLE-3 heads that are not computed here


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft model for one target."""

    algorithm: DraftAlgorithm
    model: ModelConfig  # shapes of the draft's own layers
    target_hidden: int  # 0: the draft reads nothing of the target
    aux_layers: tuple[
        int, ...
    ]  # boundaries of the target whose streams the draft reads; (): the normed output
    draft_vocab: int | None  # tokens that the draft can propose; None: all, by the target's head
    norm_before_residual: bool

    @classmethod
    def load(cls, path: str | Path, algorithm: DraftAlgorithm, target: ModelConfig) -> DraftConfig:
        """`ModelError` says what does not fit the algorithm or the target."""
        file = Path(path) / "config.json"
        raw = model_files.read_json(file)
        _check_architecture(raw, algorithm, str(file))
        if algorithm == "standalone":
            model = ModelConfig.load(path)
            _check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
            return cls(algorithm, model, 0, (), None, False)
        model = ModelConfig.parse({**raw, "architectures": ["LlamaForCausalLM"]}, Path(path))
        width = raw.get("target_hidden_size") or target.hidden_size
        _check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
        _check_same(file, "target_hidden_size", width, target.hidden_size)
        if algorithm == "eagle":
            return cls(algorithm, model, width, (), None, False)
        for option in REFUSED:
            if raw.get(option):
                raise ModelError(f"{file}: {option} is not supported")
        if model.num_layers != 1:
            raise ModelError(f"{file}: {model.num_layers} layers are not supported, an EAGLE-3 head has one")
        vocab = raw.get("draft_vocab_size")
        return cls(
            algorithm,
            model,
            width,
            _aux_layers(raw, target.num_layers, str(file)),
            int(vocab) if vocab is not None else None,
            bool(raw.get("norm_before_residual", False)),
        )


def target_width(draft: DraftConfig) -> int:
    """Hidden values per token that the draft reads of the target; 0: none."""
    return draft.target_hidden * max(1, len(draft.aux_layers))


def hidden_size_for(draft: DraftConfig) -> int:
    """Hidden values that a draft step gives to the next one, and that travel with a request; 0: none."""
    return draft.model.hidden_size if draft.target_hidden else 0


def draft_fingerprint(path: str | Path, draft: DraftConfig, steps: int, topk: int) -> str:
    """What two nodes compare beside the target's fingerprint: weights, widths and the shape of drafting."""
    facts = (draft.algorithm, steps, topk, draft.aux_layers, target_width(draft), hidden_size_for(draft))
    return model_files.fingerprint(Path(path), repr((facts, draft)))


def _check_same(file: Path, what: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise ModelError(
            f"{file}: {what} is {ours}, the target has {theirs}: this draft is for another model"
        )


def _check_architecture(raw: Mapping[str, Any], algorithm: DraftAlgorithm, where: str) -> None:
    found = raw.get("architectures")
    name = found[0] if isinstance(found, list) and found else None
    if name in ARCHITECTURES[algorithm]:
        return
    fits = [other for other, names in ARCHITECTURES.items() if name in names]
    remedy = f"set speculation.algorithm to {fits[0]}" if fits else f"known are {_known()}"
    raise ModelError(f"{where}: architecture {name} is no {algorithm} draft; {remedy}")


def _known() -> str:
    return ", ".join(name for names in ARCHITECTURES.values() for name in names)


def _aux_layers(raw: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    """Boundaries: i is the stream entering layer i. Some files mean the output of layer i: aux_layer_convention."""
    section = raw.get("eagle_config") or {}
    if not section.get("use_aux_hidden_state", True):
        raise ModelError(f"{where}: use_aux_hidden_state false is not supported")
    ids = section.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (2, num_layers // 2, num_layers - 3)
    convention = raw.get("aux_layer_convention", "auto")
    if convention not in ("boundary", "output", "auto"):
        raise ModelError(f"{where}: aux_layer_convention is {convention!r}; it is boundary, output or auto")
    if convention == "output" or (convention == "auto" and ids[0] == 1):
        ids = [layer + 1 for layer in ids]
    if list(ids) != sorted(set(ids)) or not all(0 <= layer <= num_layers for layer in ids):
        raise ModelError(
            f"{where}: aux layers {list(ids)} are no ascending boundaries of {num_layers} layers"
        )
    return tuple(ids)
