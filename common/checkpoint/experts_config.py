"""The experts of a mixture-of-experts model: sizes and router, read from config.json by the rules of its family.

No torch. A family is a row of data (`ExpertRules`); what was read of one config.json is an `ExpertsConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.checkpoint.json_fields import MAX_LAYERS, MAX_WIDTH, Raw, flag, number, positive, shown
from common.errors import ModelError

MAX_EXPERTS = 1024  # published models have up to 512
MAX_CHOSEN = 32
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
SOFTMAX, SIGMOID = "softmax", "sigmoid"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's tensors in the checkpoint, after the prefix of the layer.

    The experts of a layer are two stacked tensors, `BLOCK.experts.gate_up_proj` [E, 2 I, H] with gates first and
    `BLOCK.experts.down_proj` [E, H, I], or three matrices for each expert j, `BLOCK.experts.j.GATE.weight` and so on.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction: str = "gate.e_score_correction_bias"
    # Block of the shared experts, whose projections are named as in a dense layer.
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True)
class RouterRule:
    """The rule by which a router chooses the experts of a token, and their shares in its output. All of it is float32.

    Scores are the softmax over all experts, or the sigmoid of each. The best `chosen` experts are taken. With groups,
    the experts of the `kept_groups` best groups take part, and a group is worth the sum of its best two scores. The
    shares of the chosen experts are their scores, without correction.
    """

    chosen: int
    scores: str = SOFTMAX
    corrected: bool = False  # a learned correction is added to the scores for the choice
    groups: int = 1
    kept_groups: int = 1
    normalised: bool = True  # shares are divided by their sum
    epsilon: float = 0.0  # added to that sum
    scaling: float = 1.0  # shares are multiplied by it


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of every layer whose feed-forward has them."""

    count: int  # routed experts
    inner: int  # width of one expert
    router: RouterRule
    names: ExpertNames = ExpertNames()
    # Experts that all tokens use. A shared block of several times the width of an expert is as many experts: its
    # output is the sum of theirs.
    shared: int = 0
    shared_gate: bool = False  # the shared experts have the share sigmoid(gate(x)); false: 1

    @property
    def width(self) -> int:
        """The width of all experts together."""
        return (self.count + self.shared) * self.inner


@dataclass(frozen=True, slots=True)
class ExpertRules:
    """The keys of experts in one family's config.json, and their defaults. A str is the name of a key."""

    inner: str = "moe_intermediate_size"
    scores: str = SOFTMAX
    corrected: bool = False
    grouped: bool = False  # reads n_group and topk_group
    normalised: bool | str = "norm_topk_prob"
    normalised_default: bool = False  # if config.json does not have the key
    epsilon: float = 0.0
    scaling: str | None = None
    shared_count: str | None = None  # number of shared experts
    shared_width: str | None = None  # or their width together
    shared_gate: bool = False
    # Number of dense layers before the first layer with experts; None: Qwen's decoder_sparse_step, mlp_only_layers.
    first_dense: str | int | None = None
    names: ExpertNames = ExpertNames()


QWEN = ExpertRules()
QWEN_SHARED = ExpertRules(
    normalised_default=True,
    shared_width="shared_expert_intermediate_size",
    shared_gate=True,
    names=ExpertNames(shared="shared_expert"),
)
# Qwen3.5: experts in every layer, whose shares are always normalised.
QWEN_ALL_SHARED = replace(QWEN_SHARED, normalised=True, first_dense=0)
MIXTRAL = ExpertRules(
    inner="intermediate_size",
    normalised=True,
    first_dense=0,
    names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
)
# DeepSeek-V3's rule: arXiv 2412.19437, 2.1.2.
DEEPSEEK_V3 = ExpertRules(
    scores=SIGMOID,
    corrected=True,
    grouped=True,
    normalised_default=True,
    epsilon=1e-20,
    scaling="routed_scaling_factor",
    shared_count="n_shared_experts",
    first_dense="first_k_dense_replace",
)


def parse_experts(
    raw: Raw, rules: ExpertRules, layers: int, where: str
) -> tuple[ExpertsConfig, tuple[bool, ...]]:
    """Return the experts, and for each layer whether it has them. Raises ModelError."""
    key = next((each for each in COUNT_KEYS if raw.get(each) is not None), COUNT_KEYS[0])
    count = positive(raw, key, where, most=MAX_EXPERTS)
    inner = positive(raw, rules.inner, where, most=MAX_WIDTH)
    chosen = positive(raw, "num_experts_per_tok", where, most=MAX_CHOSEN)
    if chosen > count:
        raise ModelError(f"{where}: num_experts_per_tok {chosen} is more than the {count} experts ({key})")
    config = ExpertsConfig(
        count,
        inner,
        _router(raw, rules, count, chosen, where),
        rules.names,
        _shared(raw, rules, inner, where),
        rules.shared_gate,
    )
    return config, _layers_with_experts(raw, rules, layers, where)


def _router(raw: Raw, rules: ExpertRules, count: int, chosen: int, where: str) -> RouterRule:
    groups = positive(raw, "n_group", where, 1) if rules.grouped else 1
    kept = positive(raw, "topk_group", where, 1) if rules.grouped else 1
    if count % groups or kept > groups or (groups > 1 and count == groups):
        raise ModelError(
            f"{where}: n_group {groups} and topk_group {kept} do not divide {count} experts into groups of two or more"
        )
    if count // groups * kept < chosen:
        raise ModelError(
            f"{where}: num_experts_per_tok {chosen} is more than the {count // groups * kept} experts of topk_group "
            f"{kept} groups"
        )
    normalised = rules.normalised
    if isinstance(normalised, str):
        normalised = flag(raw, normalised, where, rules.normalised_default)
    return RouterRule(
        chosen,
        rules.scores,
        rules.corrected,
        groups,
        kept,
        normalised,
        rules.epsilon,
        number(raw, rules.scaling, where, 1.0) if rules.scaling else 1.0,
    )


def _shared(raw: Raw, rules: ExpertRules, inner: int, where: str) -> int:
    """Return the number of shared experts."""
    if rules.shared_count is not None:
        count = raw.get(rules.shared_count)
        return 0 if count in (None, 0) else positive(raw, rules.shared_count, where, most=MAX_CHOSEN)
    if rules.shared_width is None:
        return 0
    width = positive(raw, rules.shared_width, where, most=MAX_WIDTH)
    if width % inner or width // inner > MAX_CHOSEN:
        raise ModelError(
            f"{where}: {rules.shared_width} {width} is not 1 to {MAX_CHOSEN} times the width of an expert, {inner}"
        )
    return width // inner


def _layers_with_experts(raw: Raw, rules: ExpertRules, layers: int, where: str) -> tuple[bool, ...]:
    if rules.first_dense is None:
        step = positive(raw, "decoder_sparse_step", where, 1)
        dense = raw.get("mlp_only_layers") or []
        listed = isinstance(dense, list) and len(dense) <= MAX_LAYERS
        if not listed or not all(type(layer) is int for layer in dense):
            raise ModelError(
                f"{where}: mlp_only_layers must be a list of at most {MAX_LAYERS} layers, found {shown(dense)}"
            )
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    first = rules.first_dense
    if isinstance(first, str):
        found = raw.get(first, 1)
        if type(found) is not int or found < 0:
            raise ModelError(f"{where}: {first} must be a number of layers, found {shown(found)}")
        first = found
    return tuple(layer >= first for layer in range(layers))
