"""What a draft model's directory says, read beside the target's config. No torch.

The widths of everything that passes between target and draft come from functions here and from nowhere else:
`target_width` (what the target gives per token), `hidden_size_for` (what one draft step gives to the next), and
`proposals_for` and `hidden_rows_for` (how much of it travels with a request). The engine asks them through the types
that have those widths (common/engine/forward/draft_inputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common import model_files
from common.aux_layers import AuxLayers, aux_layers
from common.errors import ModelError
from common.json_fields import MAX_WIDTH, architecture_of, flag, positive, shown
from common.model_config import FAMILIES, ModelConfig
from common.mtp_format import ARCHITECTURES as MTP_ARCHITECTURES
from common.mtp_format import MAX_MODULES, MODULES, MtpFormat, has_modules, mtp_format
from common.rope_config import SECTIONS, split_sections, with_sections

DraftAlgorithm = Literal["eagle3", "eagle", "mtp", "standalone"]

ARCHITECTURES: Mapping[DraftAlgorithm, tuple[str, ...]] = {
    "eagle3": ("LlamaForCausalLMEagle3",),  # and whatever begins or ends with Eagle3: the tensors tell
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "mtp": tuple(MTP_ARCHITECTURES),
    "standalone": tuple(FAMILIES),  # any model that could be served, with the same vocabulary
}
EAGLE3 = "Eagle3"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft model for one target."""

    algorithm: DraftAlgorithm
    model: ModelConfig  # shapes of the draft's own layers
    target_hidden: int  # 0: the draft reads nothing of the target
    aux: AuxLayers  # streams of the target that the draft reads
    draft_vocab: int | None  # tokens that the draft can propose; None: all, by the target's head
    norm_before_residual: bool  # what goes past attention is the normed stream
    mtp: MtpFormat | None = None  # of a multi-layer draft: a module per step, model.num_layers of them
    fc_norms: tuple[str, ...] = ()  # norms of what the target gives, one for each equal part of it
    norm_output: bool = False  # a draft step gives its normed output to the next

    @property
    def modules(self) -> int:
        """Of a multi-layer draft: those that run, one per step. 0: one layer stack runs again for every step."""
        return 0 if self.mtp is None else self.model.num_layers

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Boundaries of the target whose streams the draft reads; (): the normed output."""
        return self.aux.boundaries

    @classmethod
    def load(cls, path: str | Path, algorithm: DraftAlgorithm, target: ModelConfig) -> DraftConfig:
        """`ModelError` says what does not fit the algorithm or the target."""
        file = Path(path) / "config.json"
        raw = _flat(model_files.read_json(file), str(file))
        _check_architecture(raw, algorithm, str(file))
        if algorithm == "standalone":
            model = ModelConfig.load(path)
            _check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
            return cls(algorithm, model, 0, AuxLayers(), None, False)
        if algorithm == "mtp":
            return _load_mtp(raw, file, target)
        plain, sections = split_sections(raw, str(file))
        model = ModelConfig.parse({**plain, "architectures": ["LlamaForCausalLM"]}, Path(path))
        model = replace(model, rope=with_sections(model.rope, sections, model.head_dim, str(file)))
        if sections != target.rope.sections:
            raise ModelError(
                f"{file}: {SECTIONS} is {list(sections) or 'not set'}, the target has "
                f"{list(target.rope.sections) or 'none'}: a draft reads the positions of its target"
            )
        width = positive(raw, "target_hidden_size", str(file), target.hidden_size, MAX_WIDTH)
        _check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
        _check_same(file, "target_hidden_size", width, target.hidden_size)
        if algorithm == "eagle":
            return cls(algorithm, model, width, AuxLayers(), None, False)
        aux = aux_layers(raw, target.num_layers, str(file))
        vocab = None
        if raw.get("draft_vocab_size") is not None:
            vocab = positive(raw, "draft_vocab_size", str(file), most=model.vocab_size)
        return cls(
            algorithm,
            model,
            width,
            aux,
            vocab,
            flag(raw, "norm_before_residual", str(file)),
            fc_norms=_fc_norms(raw, len(aux.boundaries) or 1, str(file)),
            norm_output=flag(raw, "norm_output", str(file)),
        )


def algorithm_of(path: str | Path, target: str | Path) -> DraftAlgorithm:
    """Which algorithm drafts with the model in `path`, by its config.json alone. Raises ModelError.

    A model that could be served by itself drafts standalone; one whose checkpoint holds prediction modules does so
    too, unless it is the target itself, whose modules are then meant.
    """
    file = Path(path) / "config.json"
    raw = _flat(model_files.read_json(file), str(file))
    if has_modules(raw) and Path(path).resolve() == Path(target).resolve():
        return "mtp"
    name = architecture_of(raw)
    found = next((algorithm for algorithm in ARCHITECTURES if _is_of(name, algorithm)), None)
    if found is None:
        raise ModelError(f"{file}: architecture {str(name)[:80]} is no draft; known are {_known()}")
    return found


def with_steps(draft: DraftConfig, steps: int) -> DraftConfig:
    """The draft as it runs for so many steps: of a multi-layer one the first modules. `ModelError` if it has fewer."""
    if draft.mtp is None:
        return draft
    if steps > draft.modules:
        raise ModelError(
            f"this draft has {draft.modules} modules, one for each step: set speculation.steps to at most "
            f"{draft.modules}, not {steps}"
        )
    model = replace(draft.model, num_layers=steps, sliding_windows=draft.model.sliding_windows[:steps])
    return replace(draft, model=model)


def target_width(draft: DraftConfig) -> int:
    """Hidden values per token that the draft reads of the target; 0: none."""
    return draft.target_hidden * max(1, len(draft.aux_layers))


def hidden_size_for(draft: DraftConfig) -> int:
    """Hidden values that a draft step gives to the next one; 0: none."""
    return draft.model.hidden_size if draft.target_hidden else 0


def hidden_rows_for(draft: DraftConfig) -> int:
    """Hidden states that travel with a request: the newest, or one for each module but the first (see mtp.py)."""
    if not draft.target_hidden:
        return 0
    return draft.modules - 1 if draft.modules else 1


def proposals_for(draft: DraftConfig, topk: int) -> int:
    """Drafts that travel with a request: those of the first step, or of all steps where each has its module."""
    return topk * max(draft.modules, 1) if draft.target_hidden else 0


def lookahead_for(draft: DraftConfig) -> int:
    """How many tokens behind a position its draft KV depends on."""
    return max(draft.modules, 1) if draft.target_hidden else 0


def draft_fingerprint(path: str | Path, draft: DraftConfig, steps: int, topk: int) -> str:
    """What two nodes compare beside the target's fingerprint: weights, widths and the shape of drafting."""
    facts = (draft.algorithm, steps, topk, draft.aux_layers, target_width(draft), hidden_size_for(draft))
    # where the layers were found out from says nothing of what is computed
    return model_files.fingerprint(Path(path), repr((facts, replace(draft, aux=AuxLayers(draft.aux_layers)))))


def _load_mtp(raw: Mapping[str, Any], file: Path, target: ModelConfig) -> DraftConfig:
    """Shapes of the modules, whose number stands in for that of layers: config.json gives the target's."""
    name = str(architecture_of(raw))
    modules = positive(raw, MODULES, str(file), most=MAX_MODULES)
    own = {"num_hidden_layers": modules, "layer_types": None}
    family = MTP_ARCHITECTURES.get(name, name)
    model = ModelConfig.parse({**raw, "architectures": [family], **own}, file.parent)
    _check_same(file, "vocab_size", model.vocab_size, target.vocab_size)
    _check_same(file, "hidden_size", model.hidden_size, target.hidden_size)
    width = positive(raw, "target_hidden_size", str(file), target.hidden_size, MAX_WIDTH)
    _check_same(file, "target_hidden_size", width, target.hidden_size)
    return DraftConfig("mtp", model, width, AuxLayers(), None, False, mtp_format(raw, str(file)))


def _check_same(file: Path, what: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise ModelError(
            f"{file}: {what} is {ours}, the target has {theirs}: this draft is for another model"
        )


def _check_architecture(raw: Mapping[str, Any], algorithm: DraftAlgorithm, where: str) -> None:
    name = architecture_of(raw)
    if _is_of(name, algorithm) or (algorithm == "mtp" and name is not None and has_modules(raw)):
        return
    fits = [other for other in ARCHITECTURES if _is_of(name, other)]
    remedy = f"set speculation.algorithm to {fits[0]}" if fits else f"known are {_known()}"
    raise ModelError(f"{where}: architecture {str(name)[:80]} is no {algorithm} draft; {remedy}")


def _is_of(name: object, algorithm: DraftAlgorithm) -> bool:
    if not isinstance(name, str):
        return False
    named = algorithm == "eagle3" and (name.startswith(EAGLE3) or name.endswith(EAGLE3))
    return named or name in ARCHITECTURES[algorithm]


def _flat(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """config.json of the speculators library as others write it: its layer's settings stand in a part of their own.

    Source: https://github.com/vllm-project/speculators (config of eagle3).
    """
    kind = raw.get("speculators_model_type")
    if kind is None:
        return raw
    layer = raw.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise ModelError(
            f"{where}: speculators_model_type is {shown(kind)}; eagle3 is supported, with a transformer_layer_config"
        )
    if "norm_before_residual" not in raw:
        raise ModelError(
            f"{where}: norm_before_residual is missing, and libraries differ in what that means; write true or false"
        )
    return {**layer, **raw, "architectures": list(ARCHITECTURES["eagle3"])}


def _known() -> str:
    return ", ".join(name for names in ARCHITECTURES.values() for name in names)


def _fc_norms(raw: Mapping[str, Any], parts: int, where: str) -> tuple[str, ...]:
    """Names of their tensors: one norm over all that the target gives, or one over each of its parts."""
    whole, apart = flag(raw, "norm_before_fc", where), flag(raw, "fc_norm", where)
    if whole and apart:
        raise ModelError(f"{where}: norm_before_fc and fc_norm norm the same values: set one of them")
    if apart:
        return tuple(f"fc_norm.{index}" for index in range(parts))
    return ("input_norm",) if whole else ()
