"""The one import of Triton: kernels are declared with `kernel`, and where Triton is missing only references run.

On a machine without a GPU, TRITON_INTERPRET=1 (before this module is imported) runs kernels in NumPy: the launchers
then take CPU tensors, which is how the unit tests hold kernels and references together.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # CPU builds of torch come without it
    triton, tl, TensorDescriptor = None, None, None

__all__ = [
    "COMPILE_ERRORS",
    "await_previous",
    "cdiv",
    "chained",
    "copies_in_bulk",
    "described",
    "has_triton",
    "kernel",
    "kernel_with_varying",
    "multiprocessors",
    "next_power_of_2",
    "report_compilations",
    "tl",
]


# where a kernel does not compile or does not fit the GPU; Triton's are no RuntimeError, as torch's are
COMPILE_ERRORS: tuple[type[Exception], ...] = (RuntimeError,)
if triton is not None:
    COMPILE_ERRORS = (RuntimeError, triton.TritonError)


class _Missing:
    """Stands for a kernel that cannot be launched here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(
            f"kernel {self._name} needs Triton: install `triton`, or run this model on the CPU"
        )


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` with Triton: launch as kernel[grid](...), or call from another kernel."""
    return kernel_with_varying()(function)


def kernel_with_varying(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """The same for a kernel whose integer arguments `names` vary while serving.

    Triton compiles again where an integer is 1 or becomes divisible by 16. These are compiled once for all values.
    """

    def declare(function: Callable[..., Any]) -> Any:
        if triton is None:
            return _Missing(function.__name__)
        return triton.jit(function, do_not_specialize=list(names))

    return declare


@kernel
def await_previous(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a kernel that is launched with `chained`, before it reads or writes what other kernels write or read.

    The next kernel on the stream may be launched from now on, and this one waits until all before it have ended. One
    that is launched so and does not wait would let the next run into those before.
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def _hopper_or_later(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def chained(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels with a CHAINED parameter: programmatic dependent launch, where the GPU has it.

    A launch costs a microsecond or two between the end of one kernel and the first instruction of the next; so it is
    spent while the one before still runs.
    """
    return {"CHAINED": True, "launch_pdl": True} if _hopper_or_later(device) else {"CHAINED": False}


BULK_ALIGNMENT = 16  # bytes: where rows begin


def copies_in_bulk(*matrices: torch.Tensor) -> bool:
    """Whether the GPU copies tiles of these by itself: one instruction instead of an address per thread (Hopper)."""
    return _hopper_or_later(matrices[0].device) and all(
        each.data_ptr() % BULK_ALIGNMENT == 0 and each.stride(0) * each.element_size() % BULK_ALIGNMENT == 0
        for each in matrices
    )


def described(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """A matrix whose rows are adjacent, as a kernel loads tiles [rows, columns] of it; zero behind its end."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])


def report_compilations(
    report: Callable[[str, float], None], begins: Callable[[], None] = lambda: None
) -> None:
    """From now on, call report(kernel and its specialization, seconds) after each compilation in this process.

    `begins` is called before it.

    Set once a node is ready: a kernel that compiles while serving holds up every request of that step for a second.
    """
    if triton is None:
        return
    begun: dict[str, float] = {}

    def before(*, key: str, **_: object) -> bool:
        begins()
        begun[key] = time.perf_counter()
        return False  # go on and compile

    def after(*, key: str, repr: str, **_: object) -> None:
        report(repr, time.perf_counter() - begun.pop(key, time.perf_counter()))

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after


def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return triton is not None


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors; of an H200 where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
