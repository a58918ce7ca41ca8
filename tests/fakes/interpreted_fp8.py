"""Conversions between float8_e4m3fn and float32 in Triton's interpreter, as GPUs do them.

The interpreter's own conversion loses the carry when a mantissa is rounded up to the next power of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.engine.ops.triton_kernel import tl


def convert_fp8_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels in the interpreter round to e4m3 as torch does. Needs Triton."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    other = builder.create_fp_to_fp

    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.float8e4nv):
            values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
            return handle(values.view(torch.uint8).numpy(), target.scalar)
        if kinds == (tl.float8e4nv, tl.float32):
            stored = torch.from_numpy(np.ascontiguousarray(source.data.view(np.uint8)))
            return handle(stored.view(torch.float8_e4m3fn).float().numpy(), target.scalar)
        return other(self, source, target, rounding)

    monkeypatch.setattr(builder, "create_fp_to_fp", convert)
