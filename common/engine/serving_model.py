"""The model of a node at start-up: loaded to its device, with the facts that the rest of the node is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import Cluster
from common.config.transport_choice import choose_transport
from common.draft_config import DraftConfig
from common.engine.draft_runner import DraftRunner
from common.engine.kv_cache.page_space import PageSpace, as_bigram_keys, as_keys
from common.engine.kv_cache.pool import KvPool
from common.engine.kv_cache.radix_cache import NoPrefixCache, RadixCache
from common.engine.kv_cache.relay_state import DraftShape
from common.engine.layers.placement import Placement
from common.engine.logit_adjustments import adjustment_bytes
from common.engine.memory import MemoryPlan, check_memory, token_bytes, weight_bytes
from common.engine.model_runner import ModelRunner, load_model
from common.engine.models.llama import LlamaForCausalLM
from common.engine.serving_draft import ServingDraft, load_serving_draft
from common.engine.weights import resolve_dtype
from common.errors import ConfigError
from common.messages.router_inbox import ConfigValue
from common.model_config import ModelConfig, model_fingerprint
from common.model_files import read_weight_files
from common.observability.startup import StartupReporter


@dataclass(frozen=True, slots=True)
class ServingModel:
    """One loaded checkpoint."""

    model: LlamaForCausalLM
    config: ModelConfig
    placement: Placement
    fingerprint: str
    num_pages: int  # of the KV pool, padding page included
    max_model_len: int  # tokens that one request may have on this node
    draft: ServingDraft | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.placement.dtype).removeprefix("torch.")

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(KV heads, head_dim) per layer, the target's first, then the draft's."""
        own = [(self.config.num_kv_heads, self.config.head_dim)] * self.config.num_layers
        return own if self.draft is None else own + self.draft.kv_shapes

    @property
    def kv_fingerprint(self) -> str:
        """What gives a page its meaning: the target and, if there is one, the draft."""
        return self.fingerprint if self.draft is None else f"{self.fingerprint}+{self.draft.fingerprint}"

    @property
    def draft_shape(self) -> DraftShape:
        return DraftShape() if self.draft is None else self.draft.shape

    def draft_runner(
        self, target: KvPool, layout_offsets: Sequence[int]
    ) -> tuple[DraftRunner | ModelRunner, KvPool] | None:
        """The draft over the planes behind the target's, in the same storage and pages. None without a draft."""
        if self.draft is None:
            return None
        model = self.draft.config.model
        pool = KvPool(
            model.num_layers,
            model.num_kv_heads,
            model.head_dim,
            target.page_size,
            target.num_pages,
            target.dtype,
            target.device,
            target.storage,
            layout_offsets[2 * target.num_layers :],
        )
        return self.draft.runner(pool), pool

    def describe(self, pool_bytes: int, transport: str) -> dict[str, ConfigValue]:
        """What /server_info shows of this node."""
        return {
            "device": str(self.placement.device),
            "dtype": self.dtype_name,
            "architecture": self.config.architecture,
            "pool_pages": self.num_pages - 1,
            "pool_bytes": pool_bytes,
            "max_model_len": self.max_model_len,
            "transport": transport,
            "draft": "none" if self.draft is None else self.draft.config.algorithm,
        }


def load_serving_model(
    path: Path,
    cluster: Cluster,
    device_name: str,
    pool_tokens: int,
    pool_key: str,
    max_rows: int,
    reporter: StartupReporter,
    draft_path: Path | None = None,
) -> ServingModel:
    """Load weights with progress. Raises ModelError, or ConfigError where the config does not fit the model.

    Args:
        max_rows: requests in one step of this node, for what sampling keeps of each.
    """
    choose_transport(cluster)  # raises where these nodes cannot give each other pages
    device = _device(device_name)
    draft_config = _draft_config(cluster, draft_path, path)
    beside = {} if draft_config is None or draft_path is None else {draft_path: draft_config.model}
    _check_memory(path, cluster, device, pool_tokens, pool_key, max_rows, beside)
    if device.type == "cpu" and cluster.process.threads:
        torch.set_num_threads(cluster.process.threads)
    fingerprint = model_fingerprint(path)
    reporter.report("loading", 0, 1)
    model, config = load_model(
        path,
        cluster.model.dtype,
        device,
        lambda done, total: reporter.report("loading", done, total),
        () if draft_config is None else draft_config.aux_layers,
    )
    placement = Placement(resolve_dtype(cluster.model.dtype, config.dtype, device), device)
    wanted = cluster.model.max_model_len
    if wanted is not None and wanted > config.max_position_embeddings:
        raise ConfigError(
            "model.max_model_len",
            f"{wanted} is more than the model's {config.max_position_embeddings} positions",
        )
    pages = pool_tokens // cluster.kv.page_size
    if pages < 1:
        raise ConfigError(pool_key, f"{pool_tokens} tokens are less than one page of {cluster.kv.page_size}")
    longest = min(wanted or config.max_position_embeddings, pages * cluster.kv.page_size)
    draft = None
    if draft_config is not None and draft_path is not None:
        draft = load_serving_draft(
            draft_path, draft_config, cluster.speculation.steps, cluster.speculation.topk, model, placement
        )
    return ServingModel(model, config, placement, fingerprint, pages + 1, longest, draft)


def page_space(cluster: Cluster, served: ServingModel, prefix_cache: bool) -> PageSpace:
    """Page bookkeeping; prefix caching off is a cache that never matches."""
    size = cluster.kv.page_size
    cache = RadixCache(size) if prefix_cache else NoPrefixCache()
    return PageSpace(size, served.num_pages, cache, as_bigram_keys if served.draft_shape.hidden else as_keys)


def _draft_config(cluster: Cluster, draft_path: Path | None, target: Path) -> DraftConfig | None:
    algorithm = cluster.speculation.algorithm
    if algorithm == "none" or algorithm == "ngram" or draft_path is None:
        return None
    return DraftConfig.load(draft_path, algorithm, ModelConfig.load(target))


def _device(name: str) -> torch.device:
    """The device of that name, made current. Raises ConfigError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"{name!r} is not a device; write cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not supported; write cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError("device", f"{name!r}: torch finds no CUDA device on this machine; use cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            "device", f"{name!r}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}"
        )
    torch.cuda.set_device(index)  # kernels are launched on the current device
    return torch.device("cuda", index)


def _check_memory(
    path: Path,
    cluster: Cluster,
    device: torch.device,
    pool_tokens: int,
    pool_key: str,
    max_rows: int,
    drafts: Mapping[Path, ModelConfig] = {},
) -> None:
    """Raises ConfigError where this node, or all nodes of the cluster on this GPU, do not fit on it."""
    if device.type != "cuda":
        return
    config = ModelConfig.load(path)
    models = {path: config, **drafts}
    dtype = resolve_dtype(cluster.model.dtype, config.dtype, device)
    weights = sum(weight_bytes(read_weight_files(each), dtype) for each in models)
    per_token = sum(token_bytes(each, dtype) for each in models.values())
    names = (str(device), "cuda") if device.index == 0 else (str(device),)

    def plan(tokens: int, rows: int) -> MemoryPlan:
        pool = (tokens + cluster.kv.page_size) * per_token
        return MemoryPlan(weights, pool, sampling=adjustment_bytes(rows, config.vocab_size))

    plans = [
        plan(section.pool_tokens, rows)
        for section, rows in (
            (cluster.prefill, cluster.prefill.max_batch),
            (cluster.decode, cluster.decode.max_running),
        )
        for node in section.nodes
        if node.device in names
    ]
    own = plan(pool_tokens, max_rows)
    beside = sum(each.total for each in plans) - own.total
    check_memory(device, own, beside, pool_key, per_token)
