"""Compiles kernels on threads for a GPU that this machine lacks. It runs as a process, without TRITON_INTERPRET:

    python -m tests.fakes.compile_ahead    prints a line of JSON

It is about common/engine/ops/compile_ahead.py: what compiles, what is launched, and what is raised where.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
from triton.runtime.driver import driver

from common.engine.ops import rms_norm, silu_mul
from common.engine.ops.compile_ahead import compiling_ahead
from common.engine.ops.triton_kernel import chained, kernel, report_compilations, tl, triton
from tests.fakes.compile_for import NoGpu

CPU = torch.device("cpu")
launched: list[str] = []
loaded: list[str] = []


@kernel
def broken_kernel(x_ptr, CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(CHAINED is None, "does not compile")


class Launcher:
    """Takes the place of the C code that launches a kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = src.fn.fn.__name__
        loaded.append(threading.current_thread().name)

    def __call__(self, *_: object) -> None:
        launched.append(self._name)


class Utilities:
    """Loads nothing, onto a GPU with room for everything."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024


class FakeGpu(NoGpu):
    """A driver whose kernels can be loaded and launched, which does nothing."""

    launcher_cls = Launcher
    utils = Utilities()


def norm() -> None:
    rms_norm.rms_norm_triton(torch.zeros(2, 64), torch.ones(64), 1e-5)


def gate() -> None:
    silu_mul.silu_mul_triton(torch.zeros(2, 128))


def main() -> None:
    driver.set_active(FakeGpu(90))
    for module in (rms_norm, silu_mul):
        setattr(module, "chained", lambda _: chained(CPU))  # noqa: B010
    told: list[float] = []
    report_compilations(lambda name, seconds: told.append(seconds))
    found: dict[str, object] = {}
    with compiling_ahead(CPU, threads=2) as kernels:
        norm()
        broken_kernel[(1,)](torch.zeros(1), CHAINED=True)
        found["cached at first"] = kernels.were_cached()
        kernels.collect()
        norm()  # found, and not launched either
        gate()
    found["launched ahead"] = list(launched)
    found["loaded on"] = sorted({name.rpartition("_")[0] for name in loaded})
    found["compilations"] = list(told)
    norm()
    gate()
    found["launched"] = list(launched)
    found["compilations later"] = len(told)
    try:
        broken_kernel[(1,)](torch.zeros(1), CHAINED=True)
    except triton.TritonError as error:
        found["raised"] = type(error).__name__
    for each in (rms_norm, silu_mul):
        for value in vars(each).values():
            if isinstance(value, triton.JITFunction):
                value.device_caches.clear()
    with compiling_ahead(CPU, threads=2) as kernels:
        norm()
        gate()
        found["cached again"] = kernels.were_cached()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
