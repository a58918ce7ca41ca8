"""Host memory that a node cannot use is refused at its start with the key and the remedy."""

from __future__ import annotations

import pytest
import torch

from common.engine.host_memory import host_memory
from common.errors import ConfigError
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import NoPrefixCache
from common.node.host_bytes import HostBytes
from prefill_node.host_parts import make_host_parts
from prefill_node.host_tier import HostPrefixes, NoHostTier
from tests.fakes.node_cluster import NodeCluster, PrefillSide, Shape

SHAPE = Shape(prompt_graphs="none")


@pytest.fixture(scope="module")
def cluster() -> NodeCluster:
    with NodeCluster(SHAPE) as cluster:
        return cluster


def parts(cluster: NodeCluster, nbytes: int, space: PageSpace | None = None) -> object:
    side: PrefillSide = cluster.prefill
    return make_host_parts(nbytes, 16, side.forwards, space or side.space).tier


def test_none_is_an_empty_value(cluster: NodeCluster) -> None:
    assert isinstance(parts(cluster, 0), NoHostTier)


def test_its_size_is_what_was_given(cluster: NodeCluster) -> None:
    tier = parts(cluster, 8 << 20)
    assert isinstance(tier, HostPrefixes)
    page = cluster.prefill.forwards.layout.page_bytes
    assert (6 << 20) < tier.cache.total_blocks * 16 * page < (8 << 20)


def test_what_cannot_be_used_is_refused(cluster: NodeCluster) -> None:
    with pytest.raises(
        ConfigError, match=r"prefill\.host_mib: 9 bytes leave no room .*; write a larger value"
    ):
        parts(cluster, 9)
    with pytest.raises(ConfigError, match=r"prefill\.host_mib: .* are more than the .* GiB of this machine"):
        parts(cluster, host_memory() + 1)
    space = PageSpace(16, 9, NoPrefixCache())
    with pytest.raises(ConfigError, match=r"prefill\.host_mib: .*prefill\.state_snapshots is 0"):
        parts(cluster, 8 << 20, space)


def test_memory_of_a_cpu_node_is_not_pinned() -> None:
    memory = HostBytes(4096, torch.device("cpu")).tensor
    assert memory.shape == (4096,)
    assert not memory.is_pinned()
