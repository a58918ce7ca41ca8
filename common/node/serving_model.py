"""The model of a node at start-up: loaded to its device, with the facts from which the rest of the node is built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from common.checkpoint.draft_config import DraftConfig, lookahead_for, quantized_draft, with_steps
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import MakeAttention
from common.engine.forward.model_runner import load_model
from common.engine.layers.placement import Placement
from common.engine.layers.ranks import ONE_RANK, Ranks
from common.engine.models.causal_lm import CausalLM
from common.engine.sampling.logit_adjustments import adjustment_bytes
from common.engine.state.draft_row import DraftShape
from common.engine.state.pool import KvPool
from common.engine.state.state_rows import NO_WINDOW, WindowShape
from common.engine.weights import resolve_dtype
from common.errors import ConfigError
from common.kv_cache.layer_kinds import state_grid, window_widths
from common.kv_cache.page_space import PageSpace, keys_with_lookahead
from common.kv_cache.plane import HeadGroup, Kept
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from common.kv_cache.radix_cache import NoPrefixCache, RadixCache
from common.kv_cache.shard import Shard
from common.kv_cache.snapshot_budget import NO_SNAPSHOTS, SnapshotBudget
from common.kv_cache.snapshots import Snapshots
from common.kv_events.publisher import NO_KV_EVENTS, KvEvents
from common.kv_events.wire import GPU
from common.messages.router_inbox import ConfigValue
from common.node.device_memory import check_memory_before_loading
from common.node.kv_dtype import check_kv_dtype, kv_dtype
from common.node.memory import (
    MemoryPlan,
    check_host_pool,
    check_memory,
    plan_pool,
)
from common.node.serving_device import serving_device
from common.node.serving_draft import ServingDraft, load_serving_draft
from common.node.torch_threads import limit_threads
from common.node_plan import NodePlan, PoolBudget
from common.observability.logs import Log
from common.observability.startup import Progressing
from common.speculation.directory import compare_with_target, load_draft_config

NO_CACHE = "off: the model keeps a state per request, which no cached prefix has"
CACHED = "on: a prefix is reused up to the last token after which its state was saved"
TRIAL_PAGES = 2  # the padding page, on which graphs are captured, and one more


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory that a node takes of its device."""

    budget: PoolBudget
    plan: MemoryPlan  # for its GPU, with an empty pool
    beside: int = 0  # bytes that this cluster's other nodes take of its GPU
    before: int = 0  # bytes that the process has taken before, for the other half of a movable node


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state that a node keeps per request; empty for models without one."""

    requests: int = 0  # that hold a state at once
    window: WindowShape = NO_WINDOW  # what a decode node keeps of the newest tokens in addition to the state
    snapshots: SnapshotBudget = NO_SNAPSHOTS  # saved states of cached prefixes; none: no prefix cache


NO_STATE = KeptState()


@dataclass(frozen=True, slots=True)
class ServingModel:
    """One loaded checkpoint."""

    model: CausalLM
    config: ModelConfig
    placement: Placement
    fingerprint: str
    spec: PoolSpec  # the planes of the target and its draft
    num_pages: int  # pages of the KV pool, including the padding page; TRIAL_PAGES on a GPU until `with_pool`
    max_model_len: int  # maximum tokens of one request on this node
    memory: NodeMemory
    draft: ServingDraft | None = None
    state: KeptState = NO_STATE

    @property
    def computes_prompts(self) -> bool:
        """Return whether prompts are computed here, and not received."""
        return self.memory.budget.section == "prefill"

    @property
    def dtype_name(self) -> str:
        return str(self.placement.dtype).removeprefix("torch.")

    @property
    def page_size(self) -> int:
        return self.spec.page_size

    @property
    def layout(self) -> PoolLayout:
        """The pool of this node, target and draft, with `num_pages`."""
        return PoolLayout(
            fingerprint=self.kv_fingerprint,
            spec=self.spec,
            num_pages=self.num_pages,
            num_slots=self.num_slots,
            tp_rank=self.placement.shard.rank,
            tp_size=self.placement.shard.size,
        )

    @property
    def held(self) -> PoolSpec:
        """The planes of `spec`, as wide as this rank keeps them."""
        return self.spec.share(self.placement.shard)

    @property
    def heads(self) -> int:
        """Query heads of an attention layer on this rank."""
        return self._heads_of(self.config)

    @property
    def draft_heads(self) -> int:
        """Query heads of an attention layer of the draft on this rank; 0 without a draft."""
        return 0 if self.draft is None else self._heads_of(self.draft.config.model)

    def _heads_of(self, config: ModelConfig) -> int:
        queries = HeadGroup(config.num_heads, config.head_dim)
        return len(self.placement.shard.heads(queries, "queries"))

    @property
    def request_slots(self) -> int:
        """State slots for requests, slot 0 included; at most as many as pages, since each request holds a page."""
        return min(self.state.requests + 1, self.num_pages) if self.state.requests else 0

    @property
    def snapshot_slots(self) -> range:
        """State slots for snapshots: after those for requests, and no more than pages."""
        if not self.state.requests:
            return range(0)
        count = min(self.state.snapshots.slots(self.num_pages, self.spec), self.num_pages - 1)
        return range(self.request_slots, self.request_slots + count)

    @property
    def num_slots(self) -> int:
        """State slots of the pool, slot 0 included."""
        return self.request_slots + len(self.snapshot_slots)

    def with_pool(self, graph_bytes: int) -> ServingModel:
        """Return the model with the pool that its config asks for, or that its share of the GPU leaves, next to its
        graphs.

        Raises ConfigError with the arithmetic if that does not fit.
        """
        device, memory = self.placement.device, self.memory
        budget, plan = memory.budget, replace(memory.plan, graphs=graph_bytes)
        if budget.tokens is None:
            total = torch.cuda.mem_get_info(device)[1]
            cost = self.state.snapshots.page_cost(self.spec, self.held)
            pages = plan_pool(total, plan, budget, cost)
        else:
            pages = budget.tokens // self.page_size + 1
            whole = replace(plan, pool=pages * self.held.page_bytes)
            held = torch.cuda.memory_reserved(device) - memory.before
            check_memory(device, whole, memory.beside, budget.key, self.held.token_bytes, held)
        longest = min(self.max_model_len, (pages - 1) * self.page_size)
        return replace(self, num_pages=pages, max_model_len=longest, memory=replace(memory, plan=plan))

    @property
    def kv_fingerprint(self) -> str:
        """Identifies the meaning of a page: the target and, if there is one, the draft."""
        return self.fingerprint if self.draft is None else f"{self.fingerprint}+{self.draft.fingerprint}"

    @property
    def draft_shape(self) -> DraftShape:
        return DraftShape() if self.draft is None else self.draft.shape

    def draft_runner(self, target: KvPool, attention: MakeAttention) -> tuple[object, KvPool] | None:
        """Return the draft over its planes in the storage and pages of the target's pool; None without a draft."""
        if self.draft is None:
            return None
        pool = KvPool(target.layout, "draft", target.storage)
        return self.draft.runner(pool, attention), pool

    def describe(self, pool_bytes: int, transport: str, max_rows: int) -> dict[str, ConfigValue]:
        """Return the fields of this node for /server_info. `pool_bytes`: of pages and state slots together."""
        return {
            "device": str(self.placement.device),
            "dtype": self.dtype_name,
            "kv_dtype": kv_dtype(self.spec) or self.dtype_name,
            "weights": self.config.weights.describe(),
            "architecture": self.config.architecture,
            "vision": "none" if self.config.vision is None else self.config.vision.architecture,
            "pool_pages": self.num_pages - 1,
            "pool_bytes": pool_bytes,
            "memory_plan": self._memory_plan() if self.placement.device.type == "cuda" else "",
            "sampling_bytes": adjustment_bytes(max_rows, self.config.vocab_size),
            "max_model_len": self.max_model_len,
            "transport": transport,
            "draft": "none",
            **(self._describe_state() if self.num_slots else {}),
            **({} if self.draft is None else self.draft.describe()),
        }

    def _memory_plan(self) -> str:
        pool, snapshots = (
            self.num_pages * self.held.page_bytes,
            len(self.snapshot_slots) * self.held.state_bytes,
        )
        return str(replace(self.memory.plan, pool=pool, snapshots=snapshots))

    def _describe_state(self) -> dict[str, ConfigValue]:
        count = len(self.snapshot_slots)
        return {
            "state_slots": self.request_slots - 1,
            "state_snapshots": count,
            "state_snapshot_bytes": count * self.held.state_bytes,
            **({"prefix_cache": CACHED if count else NO_CACHE} if self.computes_prompts else {}),
        }


def load_serving_model(
    plan: NodePlan,
    reporter: Progressing,
    log: Log,
    ranks: Ranks = ONE_RANK,
    loaded: ServingModel | None = None,
) -> ServingModel:
    """Load a rank's weights with progress. Raises ModelError, or ConfigError if the config does not fit the model.

    On a GPU the pool is one for a trial of the graphs; `graph_start.sized` replaces it by the one that serves.

    Args:
        loaded: has the same weights on the device already, for the other half of a movable node.
    """
    path, device, budget = Path(plan.model.path), serving_device(plan.device), plan.pool
    draft_config = _draft_config(plan)
    spec = plan.spec
    check_kv_dtype(spec, device)
    window = _check_state(plan, device, ranks.shard, log)
    memory, others = check_memory_before_loading(plan, device, ranks.shard)
    limit_threads(device, plan.threads)
    before = 0
    if loaded is None:
        model, config = _load_weights(plan, reporter, ranks, draft_config)
        log.info("weights loaded", path=str(path), format=config.weights.describe(), dtype=plan.model.dtype)
    else:
        model, config = loaded.model, loaded.config
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    max_tokens = _max_tokens(plan, config)
    num_pages, longest = _first_pool(plan, device, max_tokens)
    draft = _load_draft(plan, draft_config, model, max_tokens, log) if loaded is None else loaded.draft
    served = ServingModel(
        model,
        config,
        model.placement,
        plan.model.weights_id,
        spec,
        num_pages,
        longest,
        NodeMemory(budget, memory, others, before),
        draft,
        KeptState(plan.state_slots, window, plan.state_snapshots) if spec.state_bytes else NO_STATE,
    )
    if device.type == "cpu":
        held = served.held
        nbytes = num_pages * held.page_bytes + served.num_slots * held.state_bytes
        check_host_pool(nbytes, held.token_bytes, budget.key)
    return served


def _load_weights(
    plan: NodePlan, reporter: Progressing, ranks: Ranks, draft: DraftConfig | None
) -> tuple[CausalLM, ModelConfig]:
    """Load a rank's share of the target."""
    reporter.report("loading", 0, 1)
    return load_model(
        Path(plan.model.path),
        plan.model.dtype,
        serving_device(plan.device),
        lambda done, total: reporter.report("loading", done, total),
        () if draft is None else draft.aux_layers,
        plan.model.max_model_len,
        ranks,
        plan.model.quantization,
    )


def _max_tokens(plan: NodePlan, config: ModelConfig) -> int:
    """Return the maximum tokens of a request: the same on all nodes of a cluster, whatever their pools hold."""
    wanted, positions = plan.model.max_model_len, config.max_position_embeddings
    if wanted is not None and wanted > positions:
        raise ConfigError("model.max_model_len", f"{wanted} is more than the model's {positions} positions")
    return wanted or positions


def _first_pool(plan: NodePlan, device: torch.device, max_tokens: int) -> tuple[int, int]:
    """Return the pages of the pool that is made first, and the maximum tokens of a request on this node."""
    tokens, size = plan.pool.tokens, plan.page_size
    if tokens is None:
        return TRIAL_PAGES, max_tokens
    longest = min(max_tokens, tokens // size * size)
    if not longest:
        raise ConfigError(plan.pool.key, f"{tokens} tokens are fewer than one page of {size}")
    return tokens // size + 1 if device.type == "cpu" else TRIAL_PAGES, longest


def _load_draft(
    plan: NodePlan, config: DraftConfig | None, target: CausalLM, max_tokens: int, log: Log
) -> ServingDraft | None:
    speculation = plan.speculation
    if config is None or speculation.draft_path is None:
        return None
    path = Path(speculation.draft_path)
    draft = load_serving_draft(path, config, speculation.steps, speculation.topk, target, max_tokens)
    log.info("draft loaded", path=str(path), **draft.describe())
    return draft


def lookahead_of(served: ServingModel) -> int:
    """Return on how many following tokens the KV of a position depends."""
    return 0 if served.draft is None else lookahead_for(served.draft.config)


def page_space(
    served: ServingModel, prefix_cache: bool | Literal["auto"], events: KvEvents = NO_KV_EVENTS
) -> PageSpace:
    """Return the bookkeeping of pages and state slots; prefix caching off is a cache that never matches.

    What the cache takes and gives up is told to `events`.

    Raises ConfigError if prefix caching is required of a node that computes prompts of a model with a state per
    request, but keeps no snapshots.
    """
    size, slots, snapshots = served.page_size, served.request_slots, Snapshots(served.snapshot_slots)
    stateless = served.computes_prompts and slots and not snapshots.total
    if stateless and prefix_cache is True:
        raise ConfigError(
            "prefill.prefix_cache",
            f"must be {NO_CACHE}; write auto or false, or prefill.state_snapshots above 0",
        )
    caches = prefix_cache and not stateless
    lookahead = lookahead_of(served)
    cache = RadixCache(size, snapshots, events.tap(GPU, size, lookahead)) if caches else NoPrefixCache()
    grid = state_grid(served.config, size)
    keys = keys_with_lookahead(lookahead)
    return PageSpace(size, served.num_pages, cache, keys, slots, grid, served.computes_prompts)


def _check_state(plan: NodePlan, device: torch.device, shard: Shard, log: Log) -> WindowShape:
    """Return the window that the node keeps in addition to a state per request; empty for models without such a state.

    Raises ConfigError for a speculation setting that a state per request does not support.
    """
    if not plan.spec.state_bytes:
        return NO_WINDOW
    if plan.speculation.topk > 1:
        raise ConfigError(
            "speculation.topk",
            "must be 1: this model keeps a state per request, which follows one chain of drafts; trees have branches",
        )
    for plane in plan.spec.planes:
        if plane.owner == "draft" and plane.kept is Kept.PER_REQUEST:
            raise ConfigError(
                "speculation.draft_model_path",
                f"{plan.speculation.draft_path} keeps a state per request (layer {plane.layer}), which cannot take "
                "rejected drafts back; use a draft model with attention layers only",
            )
    if plan.role == "prefill" and plan.state_snapshots == NO_SNAPSHOTS:
        log.info("prefix cache off", reason=NO_CACHE, role=plan.role)
    config = ModelConfig.load(plan.model.path)
    dtype = resolve_dtype(plan.model.dtype, config.dtype, device)
    return WindowShape(window_widths(config, shard), plan.round_tokens, dtype)


def _draft_config(plan: NodePlan) -> DraftConfig | None:
    speculation = plan.speculation
    if speculation.draft_path is None:
        return None
    target = ModelConfig.load(plan.model.path)
    draft = load_draft_config(speculation.draft_path, speculation.algorithm, target)
    compare_with_target(Path(speculation.draft_path), speculation.algorithm, Path(plan.model.path))
    return quantized_draft(with_steps(draft, speculation.steps), speculation.draft_quantization)
