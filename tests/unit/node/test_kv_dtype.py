"""Pages in FP8 are refused where kernels cannot read them."""

from __future__ import annotations

import pytest
import torch

from common.errors import ConfigError
from common.kv_cache.kv_values import FP8
from common.kv_cache.pool_spec import PoolSpec
from common.node.kv_dtype import check_kv_dtype, kv_dtype
from tests.fakes.pools import attention_planes


@pytest.mark.parametrize(("capability", "dtype"), [((8, 9), FP8), ((9, 0), FP8), ((8, 0), "bfloat16")])
def test_gpus_that_read_the_pages(
    capability: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec = PoolSpec(16, attention_planes("target", 1, 2, 8, dtype))
    assert kv_dtype(spec) == dtype
    check_kv_dtype(spec, torch.device("cuda", 0))


def test_an_older_gpu_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    spec = PoolSpec(16, attention_planes("target", 1, 2, 8, FP8))
    check_kv_dtype(spec, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"kv\.dtype.*8\.9.*cuda:0 has 8\.0; write auto"):
        check_kv_dtype(spec, torch.device("cuda", 0))
