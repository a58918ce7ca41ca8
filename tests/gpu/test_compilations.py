"""A kernel that compiles while serving is told of: users would only see a slow first token."""

from __future__ import annotations

import pytest
import torch

from common.engine.ops.rms_norm import rms_norm
from common.engine.ops.triton_kernel import report_compilations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_each_new_specialization_is_reported_once() -> None:
    import triton

    told: list[tuple[str, float]] = []
    report_compilations(lambda kernel, seconds: told.append((kernel, seconds)))
    try:
        for width in (208, 208, 13):
            rms_norm(torch.randn(2, width, device="cuda"), torch.randn(width, device="cuda"), 1e-5)
    finally:
        triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None
    assert [kernel.partition("[")[0] for kernel, _ in told] == ["_rms_norm_kernel"] * 2
    assert all(seconds > 0 for _, seconds in told)
