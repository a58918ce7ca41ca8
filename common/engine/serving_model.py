"""The model of a node at start-up: loaded to its device, with the facts that the rest of the node is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import Cluster
from common.engine.kv_cache.page_space import PageSpace
from common.engine.kv_cache.radix_cache import NoPrefixCache, RadixCache
from common.engine.layers.placement import Placement
from common.engine.model_runner import load_model
from common.engine.models.llama import LlamaForCausalLM
from common.engine.weights import resolve_dtype
from common.errors import ConfigError
from common.messages.router_inbox import ConfigValue
from common.model_config import ModelConfig, model_fingerprint
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

    @property
    def dtype_name(self) -> str:
        return str(self.placement.dtype).removeprefix("torch.")

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(KV heads, head_dim) per layer."""
        return [(self.config.num_kv_heads, self.config.head_dim)] * self.config.num_layers

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
        }


def load_serving_model(
    path: Path, cluster: Cluster, device_name: str, pool_tokens: int, pool_key: str, reporter: StartupReporter
) -> ServingModel:
    """Load weights with progress. Raises ModelError, or ConfigError where the config does not fit the model."""
    device = _device(device_name)
    if device.type == "cpu" and cluster.process.threads:
        torch.set_num_threads(cluster.process.threads)
    fingerprint = model_fingerprint(path)
    reporter.report("loading", 0, 1)
    model, config = load_model(
        path, cluster.model.dtype, device, lambda done, total: reporter.report("loading", done, total)
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
    return ServingModel(model, config, placement, fingerprint, pages + 1, longest)


def page_space(cluster: Cluster, num_pages: int, prefix_cache: bool) -> PageSpace:
    """Page bookkeeping; prefix caching off is a cache that never matches."""
    size = cluster.kv.page_size
    return PageSpace(size, num_pages, RadixCache(size) if prefix_cache else NoPrefixCache())


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"{name!r} is not a device; write cpu") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not supported; write cpu")
    if device.type == "cuda":
        # the transports of this version read and write pages in host memory
        raise ConfigError("device", f"{name!r}: pages cannot be moved from or to a GPU yet; use cpu")
    return device
