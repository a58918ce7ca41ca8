"""The interpreter with less work: functions are replaced once per module, and kernels still compute the same."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch

from common.engine.ops.silu_mul import silu_mul_reference, silu_mul_triton
from common.engine.ops.triton_kernel import tl
from tests.fakes.quick_interpreter import ReplacedOnce


def test_functions_are_replaced_once_for_each_module() -> None:
    replaced: list[FunctionType] = []
    once = ReplacedOnce(replaced.append)
    made = {name: FunctionType((lambda: 0).__code__, {"name": name}) for name in ("one", "other")}
    for name in ("one", "other", "one", "other"):
        once(made[name]).restore()
    assert replaced == [made["one"], made["other"]]


@pytest.mark.skipif(tl is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_kernels_of_this_run_use_it() -> None:
    from triton.runtime import interpreter

    assert isinstance(interpreter._patch_lang, ReplacedOnce)
    assert not interpreter.interpreter_builder.options.sanitize_overflow
    for _ in range(2):
        x = torch.randn(3, 64)
        torch.testing.assert_close(silu_mul_triton(x), silu_mul_reference(x))
