"""Random draft models for the tiny target, as used in nodes, and a plain recomputation of their drafts."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_fields

import torch

from common.checkpoint.aux_layers import AuxLayers
from common.checkpoint.draft_config import DraftConfig
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import MtpFormat
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.forward.draft_inputs import DraftExtendInput
from common.engine.forward.draft_runner import DraftRunner
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.slots import Inputs
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.eagle import EMBEDDING, LM_HEAD, Eagle3Head, EagleHead
from common.engine.models.model_registry import build_model
from common.engine.models.mtp import MtpModule, build_mtp
from common.node.loaded_draft import HeadDraft, ModelDraft
from common.node.serving_draft import ServingDraft, draft_shape
from decode_node.request import DecodeRequest
from decode_node.speculative.drafters.drafter import Drafter
from decode_node.speculative.drafters.eagle import ChainGrowth, EagleDrafter
from decode_node.speculative.drafters.eagle_tree import TreeGrowth
from decode_node.speculative.drafters.standalone import StandaloneDrafter
from decode_node.speculative.rounds import Round, RoundCall
from decode_node.speculative.verifier import TreeAcceptor
from tests.fakes.drafters import Bench, LatestBatch, speculative
from tests.fakes.node_cluster import MakeStep, NoDraftModel
from tests.fakes.pools import model_pool, plain_pool
from tests.fakes.tiny_model import AXES, CONFIG, MAX_LEN, PLACEMENT, VOCAB, drawn, reference, tiny_model

ONE_LAYER = replace_fields(CONFIG, num_layers=1, sliding_windows=(None,))
ONE_MODULE = MtpFormat(
    "model.layers", 2, "enorm", "hnorm", "eh_proj", "shared_head.norm", embedding_first=True, chain=True
)
NARROW = replace_fields(CONFIG, hidden_size=24)  # two layers, narrower than the target
# A language model whose width, heads and number of layers differ from the target's.
NARROW_MODEL = replace_fields(
    CONFIG, hidden_size=24, num_layers=3, num_heads=3, num_kv_heads=1, head_dim=6, sliding_windows=(None,) * 3
)
DRAFTS = {
    "eagle3": DraftConfig("eagle3", ONE_LAYER, CONFIG.hidden_size, AuxLayers((0, 1, 2)), 40, False),
    "eagle3-full-vocabulary": DraftConfig(
        "eagle3", ONE_LAYER, CONFIG.hidden_size, AuxLayers((1,)), None, True
    ),
    "eagle3-narrow": DraftConfig(
        "eagle3",
        NARROW,
        CONFIG.hidden_size,
        AuxLayers((0, 2)),
        40,
        False,
        fc_norms=("fc_norm.0", "fc_norm.1"),
        norm_output=True,
    ),
    "eagle3-no-aux": DraftConfig(
        "eagle3", NARROW, CONFIG.hidden_size, AuxLayers(), None, True, fc_norms=("input_norm",)
    ),
    "eagle3-window": DraftConfig(
        "eagle3",
        replace_fields(ONE_LAYER, qk_norm=True, sliding_windows=(5,)),
        CONFIG.hidden_size,
        AuxLayers((0, 1, 2)),
        40,
        False,
    ),
    "eagle": DraftConfig("eagle", CONFIG, CONFIG.hidden_size, AuxLayers(), None, False),
    "mtp-one-module": DraftConfig(
        "mtp", ONE_LAYER, CONFIG.hidden_size, AuxLayers(), None, False, mtp=ONE_MODULE, repeats=True
    ),
}
# weights not shared with the target
OWN = {"eagle3-narrow": (EMBEDDING,), "eagle3-no-aux": (EMBEDDING, LM_HEAD)}
ON_AXES = {  # for a target with the config AXES
    "eagle3-axes": DraftConfig(
        "eagle3",
        replace_fields(AXES, num_layers=1, sliding_windows=(None,)),
        AXES.hidden_size,
        AuxLayers((0, 1, 2)),
        40,
        False,
    ),
    "eagle-axes": DraftConfig("eagle", AXES, AXES.hidden_size, AuxLayers(), None, False),
}
CONFIGS = {**DRAFTS, **ON_AXES}


@functools.cache
def tiny_draft(name: str) -> Eagle3Head | EagleHead | MtpModule:
    config = CONFIGS[name]
    target = tiny_model(aux=config.aux_layers)
    head = new_head(name, config, target, PLACEMENT).eval()
    generator = torch.Generator().manual_seed(5)
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    with torch.no_grad():
        for key, parameter in drawn(head):
            if parameter.data_ptr() not in shared:
                parameter.normal_(std=0.3, generator=generator)
                if "norm" in key:
                    parameter.add_(1.0)
        if config.draft_vocab is not None:
            ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab].sort().values
            head.get_buffer("d2t").copy_(ids - torch.arange(config.draft_vocab))
    return head


def new_head(
    name: str, config: DraftConfig, target: CausalLM, placement: Placement
) -> Eagle3Head | EagleHead | MtpModule:
    """Return the uninitialised head `name` of `CONFIGS`, with a config that the caller may have changed."""
    if config.algorithm == "mtp":
        return build_mtp(config, target, placement).heads[0]
    made = Eagle3Head if config.algorithm == "eagle3" else EagleHead
    return made(config, target, placement, OWN.get(name, ()))


class DraftModel(NoDraftModel):
    """A draft head."""

    def __init__(self, name: str, topk: int = 1) -> None:
        self.name = name
        self.topk = topk
        self.config = CONFIGS[name]
        self.algorithm = self.config.algorithm
        self.aux_layers = self.config.aux_layers
        self.target_hidden = DraftExtendInput.hidden_size_for(self.config)

    @property
    def layers(self) -> int:
        return self.config.model.num_layers

    def serving(self) -> ServingDraft:
        loaded = HeadDraft(tiny_draft(self.name), self.topk)
        return ServingDraft(loaded, self.config, self.name, draft_shape(self.config, self.topk, PLACEMENT))


class StandaloneModel(NoDraftModel):
    """A separate language model: the target with some noise, so it is often right; or a random one of other shapes."""

    algorithm = "standalone"

    def __init__(self, config: ModelConfig = CONFIG) -> None:
        self.config = config

    def serving(self) -> ServingDraft:
        config = DraftConfig("standalone", self.config, 0, AuxLayers(), None, False)
        loaded = ModelDraft(standalone_model(self.config))
        return ServingDraft(loaded, config, "standalone", draft_shape(config, 1, PLACEMENT))


@functools.cache
def standalone_model(config: ModelConfig = CONFIG) -> CausalLM:
    if config is not CONFIG:
        return tiny_model(9, config=config)
    model = build_model(config, PLACEMENT).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for (_, parameter), (_, right) in zip(drawn(model), drawn(tiny_model()), strict=True):
            parameter.normal_(std=0.01, generator=generator).add_(right)
    return model


MODELS: dict[str, Callable[[], DraftModel | StandaloneModel]] = {
    **{name: functools.partial(DraftModel, name) for name in DRAFTS},
    "standalone": StandaloneModel,
    "standalone-narrow": lambda: StandaloneModel(NARROW_MODEL),
}


def drafting(name: str, steps: int, buckets: Sequence[int] = ()) -> tuple[NoDraftModel, MakeStep]:
    """Return a cluster's draft model and its decode step."""
    model = MODELS[name]()
    return model, speculative(lambda bench: drafter(model, bench, steps), buckets=buckets)


def observed(
    name: str, steps: int, hit: float, seen: list[tuple[list[int], list[int]]], buckets: Sequence[int] = ()
) -> tuple[NoDraftModel, MakeStep]:
    """Like `drafting`, but every draft is recorded in `seen` (text, drafts).

    Then the right draft replaces it with probability `hit`: a random head is seldom right, and most possible errors
    follow accepted drafts. A standalone model keeps KV of its own drafts, so these are not replaced.
    """
    model = MODELS[name]()
    hit = 0.0 if isinstance(model, StandaloneModel) else hit
    return model, speculative(
        lambda bench: Observed(drafter(model, bench, steps), bench, hit, seen), buckets=buckets
    )


def drafter(model: DraftModel | StandaloneModel, bench: Bench, steps: int) -> Drafter:
    """Build a drafter of chains of `steps` drafts."""
    runner = bench.parts.draft
    if isinstance(model, StandaloneModel):
        assert isinstance(runner, ModelRunner)
        return StandaloneDrafter(runner, bench.rounds, steps)
    assert isinstance(runner, DraftRunner)
    return EagleDrafter(runner, bench.rounds, ChainGrowth(runner, steps), model.target_hidden)


class Watched:
    """A drafter that passes every tree that it proposes to `watch`."""

    def __init__(self, inner: Drafter, bench: Bench) -> None:
        self._inner = inner
        self._relay, self._parts = bench.parts.relay, bench.parts
        self.batch = LatestBatch()
        self.state = inner.state
        self.nodes, self.lookahead_slots = inner.nodes, inner.lookahead_slots
        self.hidden_mode = inner.hidden_mode
        self.phases, self.slots = inner.phases, inner.slots

    def propose(self, call: RoundCall) -> None:
        self._inner.propose(call)
        for index, request in enumerate(self.batch.requests):
            told = int(self._relay.seq_len[request.row]) + 1 - len(request.prompt)
            answer = self.answer(request)
            self.watch(index, [*request.prompt, *answer[:told]], answer[told:])

    def answer(self, request: DecodeRequest) -> list[int]:
        """Return the tokens of plain decoding."""
        return reference(tuple(request.prompt), request.sampling, request.emitted)[0]

    def draft_kv(self, index: int, count: int) -> torch.Tensor:
        """Return the KV of the first positions of request `index` of the batch, [planes, count, heads, D]."""
        request = self.batch.requests[index]
        assert request.lease is not None
        pool, pages = self._parts.draft_pool, torch.tensor(request.lease.pages)
        planes = [
            plane(layer).index_select(0, pages).flatten(0, 1)[:count]
            for layer in range(pool.num_layers)
            for plane in (pool.key, pool.value)
        ]
        return torch.stack(planes)

    def watch(self, index: int, text: list[int], rest: list[int]) -> None:
        """Observe tree `index` of the batch, which continues `text`; plain decoding would continue with `rest`."""
        raise NotImplementedError

    def trees(self, call: RoundCall) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.trees(call)

    def fill(self, batch: Round, inputs: Inputs) -> None:
        self._inner.fill(batch, inputs)

    def draft_extend(self, call: RoundCall) -> None:
        self._inner.draft_extend(call)


class Observed(Watched):
    """The drafter of `observed`."""

    def __init__(
        self, inner: Drafter, bench: Bench, hit: float, seen: list[tuple[list[int], list[int]]]
    ) -> None:
        super().__init__(inner, bench)
        self._hit = hit
        self._seen = seen
        self._random = random.Random(3)

    def watch(self, index: int, text: list[int], rest: list[int]) -> None:
        tokens = self.state.tree.tokens[index]
        if rest:  # past the end there are no pages and no draft that could be emitted
            self._seen.append((text, tokens[1:].tolist()[: len(rest)]))
        for step, right in enumerate(rest[: self.nodes - 1]):
            if self._random.random() < self._hit:
                tokens[1 + step] = right


Trees = list[tuple[list[int], set[tuple[int, ...]]]]


def branching(
    name: str, steps: int, topk: int, nodes: int, seen: Trees | None = None, buckets: Sequence[int] = ()
) -> tuple[NoDraftModel, MakeStep]:
    """Build a cluster whose heads draft trees; every tree is recorded in `seen` (text, paths)."""
    model = DraftModel(name, topk)

    def make(bench: Bench) -> Drafter:
        runner = bench.parts.draft
        assert isinstance(runner, DraftRunner)
        growth = TreeGrowth(runner, steps, topk, nodes)
        made = EagleDrafter(runner, bench.rounds, growth, model.target_hidden)
        return made if seen is None else ObservedTrees(made, bench, seen)

    deepest = min(steps, nodes - 1)
    lookahead_slots = max(nodes, (deepest - 1) * topk)
    return model, speculative(
        make, lambda runner: TreeAcceptor(lookahead_slots, deepest, (runner.pool,)), buckets
    )


class ObservedTrees(Watched):
    """The drafter of `branching`."""

    def __init__(self, inner: Drafter, bench: Bench, seen: Trees) -> None:
        super().__init__(inner, bench)
        self._seen = seen

    def watch(self, index: int, text: list[int], rest: list[int]) -> None:
        parents, tokens = self.state.tree.parents[index].tolist(), self.state.tree.tokens[index].tolist()
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(parents[1:], tokens[1:]):
            paths.append((*paths[parent], token))
        if rest:
            self._seen.append((text, set(paths[1:])))


@torch.inference_mode()
def eager_model_drafts(config: ModelConfig, text: Sequence[int], steps: int) -> list[int]:
    """Return the drafts of a standalone model after `text`."""
    ids = tuple(text)
    for _ in range(steps):
        ids = (*ids, _model_next(config, ids))
    return list(ids[len(text) :])


@functools.lru_cache(maxsize=8192)  # many tests ask for continuations of the same texts
def _model_next(config: ModelConfig, ids: tuple[int, ...]) -> int:
    pool = model_pool(config, MAX_LEN, 2, PLACEMENT)
    runner = ModelRunner(standalone_model(config), pool, PagedAttention(pool, config.sliding_windows))
    return int(runner(_one(list(ids))).logits[-1].argmax())


@torch.inference_mode()
def eager_drafts(name: str, text: Sequence[int], steps: int) -> list[int]:
    """Return the head's drafts after `text`, whose last token the target has not read; recomputed for each draft."""
    model = MODELS[name]() if name in MODELS else None
    if isinstance(model, StandaloneModel):
        return eager_model_drafts(model.config, text, steps)
    drafts: list[int] = []
    for _ in range(steps):
        drafts.append(eager_branches(name, text, drafts, 1)[0][1])
    return drafts


@torch.inference_mode()
def eager_branches(name: str, text: Sequence[int], path: Sequence[int], topk: int) -> list[tuple[float, int]]:
    """Return (probability, token) of the head's most likely tokens after `text` and the drafts `path`."""
    head = tiny_draft(name)
    last = _head_reads(name, tuple(text), tuple(path))[1]
    probs, ids = head.compute_logits(last)[0].softmax(-1).topk(topk)
    return list(zip(probs.tolist(), head.target_ids(ids).tolist()))


@functools.lru_cache(maxsize=8192)
def _head_reads(name: str, text: tuple[int, ...], path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all rows of `text` and `path` at once, over a pool of their own.

    Returns the hidden states [n, H] that the head reads with them, and its output [1, H] for the last one, for its LM
    head.
    """
    hidden = _head_reads(name, text, path[:-1])[0] if path else _projected(name, text[:-1])
    layers = DraftModel(name).layers
    pool = plain_pool(
        layers, CONFIG.num_kv_heads, CONFIG.head_dim, MAX_LEN, 2, PLACEMENT.dtype, PLACEMENT.device
    )
    attention = PagedAttention(pool, DRAFTS[name].model.sliding_windows)
    batch = _one([*text[1:], *path])
    attention.plan(batch)
    output = tiny_draft(name)(batch.input_ids, hidden, batch.positions, attention)
    return torch.cat((hidden, output.hidden[-1:])), output.last[-1:]


@functools.lru_cache(maxsize=8192)
def _projected(name: str, ids: tuple[int, ...]) -> torch.Tensor:
    """Project the target's hidden states to [n, H]."""
    config = DRAFTS[name]
    pool = model_pool(CONFIG, MAX_LEN, 2, PLACEMENT)
    model = tiny_model(aux=config.aux_layers)
    aux = ModelRunner(model, pool, PagedAttention(pool, CONFIG.sliding_windows))(_one(list(ids))).hidden
    assert aux is not None
    return tiny_draft(name).project(aux)


def _one(ids: list[int]) -> ForwardBatch:
    arange = torch.arange(len(ids))
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=torch.tensor(ids),
        positions=arange,
        kv_slots=arange + MAX_LEN,
        page_table=torch.ones(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([len(ids)], dtype=torch.int32),
        query_start=torch.tensor([0, len(ids)], dtype=torch.int32),
        logits_rows=torch.tensor([len(ids) - 1]),
        max_seq_len=len(ids),
        hidden_mode=CaptureHiddenMode.FULL,
        query_lens_host=(len(ids),),
        seq_lens_host=(len(ids),),
    )
