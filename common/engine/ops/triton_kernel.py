"""The only import of Triton: kernels are declared with `kernel`, and without Triton only references run.

On a machine without a GPU, TRITON_INTERPRET=1 (before this module is imported) runs kernels in NumPy: the launchers
then take CPU tensors, which lets unit tests compare kernels with references.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # CPU builds of torch do not include it
    triton, tl, TensorDescriptor = None, None, None
try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
except ImportError:
    gl, GluonJITFunction, hopper, GluonDescriptor = None, None, None, None
# The name changed with Triton 3.7.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)

__all__ = [
    "COMPILE_ERRORS",
    "LOG2_E",
    "await_previous",
    "await_results",
    "cdiv",
    "chained",
    "compiling_only",
    "copies_in_bulk",
    "described",
    "full_tile",
    "gl",
    "gluon_kernel",
    "has_triton",
    "hopper",
    "is_hopper",
    "kernel",
    "kernel_with_varying",
    "launch_next",
    "launches",
    "multiprocessors",
    "next_power_of_2",
    "report_compilations",
    "swizzled_tiles",
    "thread_barrier",
    "tl",
    "triton",
]


# Raised when a kernel does not compile or does not fit the GPU; unlike torch's, Triton's errors are not RuntimeErrors.
COMPILE_ERRORS: tuple[type[Exception], ...] = (RuntimeError,)
if triton is not None:
    COMPILE_ERRORS = (RuntimeError, triton.TritonError)


class _Missing:
    """Placeholder of a kernel that cannot be launched on this machine."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(
            f"kernel {self._name} needs Triton: install `triton`, or run this model on the CPU"
        )


_compiling_only: ContextVar[bool] = ContextVar("compiling_only", default=False)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Let launches of this thread's context compile their kernel and stop there; see `compile_ahead`."""
    token = _compiling_only.set(True)
    try:
        yield
    finally:
        _compiling_only.reset(token)


def launches() -> bool:
    """Return whether launches run kernels; False within `compiling_only`."""
    return not _compiling_only.get()


if triton is not None:

    class _CompilableKernel(triton.JITFunction):  # type: ignore[misc]  # Triton has no types
        """A kernel whose launches `compiling_only` stops after compilation."""

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return super().run(*args, grid=grid, warmup=warmup or _compiling_only.get(), **options)


if GluonJITFunction is not None:

    class _CompilableGluonKernel(GluonJITFunction):  # type: ignore[misc]  # Triton has no types
        """A kernel in Gluon whose launches `compiling_only` stops after compilation."""

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return super().run(*args, grid=grid, warmup=warmup or _compiling_only.get(), **options)


def gluon_kernel(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Do as `kernel_with_varying` for a kernel in Gluon, which has no interpreter: the kernel can only be compiled."""

    def declare(function: Callable[..., Any]) -> Any:
        if GluonJITFunction is None:
            return _Missing(function.__name__)
        return _CompilableGluonKernel(function, do_not_specialize=list(names))

    return declare


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` with Triton: launch as kernel[grid](...), or call from another kernel."""
    return kernel_with_varying()(function)


def kernel_with_varying(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Do as `kernel` for a kernel whose integer arguments `names` vary while serving.

    Triton compiles again if an integer is 1 or becomes divisible by 16. These arguments are compiled once for all
    values.
    """

    def declare(function: Callable[..., Any]) -> Any:
        if triton is None:
            return _Missing(function.__name__)
        if triton.knobs.runtime.interpret:
            return triton.jit(function, do_not_specialize=list(names))
        return _CompilableKernel(function, do_not_specialize=list(names))

    return declare


@kernel
def await_previous(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a kernel that is launched with `chained`, before it reads or writes memory that other kernels use.

    From this call on the next kernel on the stream may be launched, and this kernel waits until all earlier ones have
    ended. A chained kernel that does not wait would let the next one overlap with the earlier ones.
    """
    launch_next(CHAINED)
    await_results(CHAINED)


@kernel
def launch_next(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel on the stream be launched as soon as all programs of this one have begun."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def await_results(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all earlier kernels on the stream have ended.

    Between `launch_next` and this call a kernel may read what no kernel of a step writes, such as weights.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@functools.cache
def _hopper_or_later(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def chained(device: torch.device) -> dict[str, bool]:
    """Return the launch options of kernels with a CHAINED parameter: programmatic dependent launch, if supported.

    A launch costs a microsecond or two between the end of one kernel and the first instruction of the next; with this
    option that time passes while the previous kernel still runs.
    """
    return {"CHAINED": True, "launch_pdl": True} if _hopper_or_later(device) else {"CHAINED": False}


# Gluon is experimental, and its names change. Those that kernels use are in Triton 3.6 to 3.8; with another version the
# kernels of other GPUs serve.
HAS_GLUON = thread_barrier is not None and hasattr(gl.shared_memory_descriptor, "_reinterpret")


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether kernels in Gluon for Hopper run on this device: later GPUs lack its matrix instructions."""
    return HAS_GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def swizzled_tiles(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor from which a kernel in Gluon copies tiles [rows, columns] of a matrix; zero past its end.

    They are 128 bytes wide, of 16-bit values, and stored as the matrix units of a Hopper GPU read them.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return GluonDescriptor.from_tensor(matrix, [rows, columns], layout)


BULK_ALIGNMENT = 16  # bytes: alignment of row starts


def copies_in_bulk(*matrices: torch.Tensor) -> bool:
    """Return whether the GPU (Hopper or later) copies tiles of these by one instruction instead of one per thread."""
    return _hopper_or_later(matrices[0].device) and all(
        each.data_ptr() % BULK_ALIGNMENT == 0 and each.stride(0) * each.element_size() % BULK_ALIGNMENT == 0
        for each in matrices
    )


def described(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor from which a kernel loads tiles [rows, columns] of a matrix; zero past its end."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])


def full_tile(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a matrix [n, K] with the rows that follow it in its storage, up to `rows`, if n is smaller.

    A bulk copy takes time for rows past the end (tests/bench/NOTES.md, "Steps of 65 to 127 requests"). Those that
    follow have any values, and are for kernels in which a row does not depend on others.
    """
    stride, width = matrix.stride(0), matrix.shape[1]
    if len(matrix) >= rows or stride < width:
        return matrix
    values = matrix.untyped_storage().nbytes() // matrix.itemsize - matrix.storage_offset()
    held = min(rows, (values - width) // stride + 1)
    return matrix.as_strided((held, width), matrix.stride()) if held > len(matrix) else matrix


def report_compilations(
    report: Callable[[str, float], None], begins: Callable[[], None] = lambda: None
) -> None:
    """Call report(kernel and its specialization, seconds) after each later compilation in this process.

    `begins` is called before each. This is set once a node is ready: a kernel that compiles while serving delays
    every request of that step by a second. What `compile_ahead` compiles on other threads is reported with 0 seconds.
    """
    if triton is None:
        return
    begun: dict[str, float] = {}

    def before(*, key: str, **_: object) -> bool:
        if launches():  # others are compiled beside this thread
            begins()
            begun[key] = time.perf_counter()
        return False  # continue and compile

    def after(*, key: str, repr: str, **_: object) -> None:
        report(repr, time.perf_counter() - begun.pop(key) if key in begun else 0.0)

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after


def has_triton() -> bool:
    """Return whether kernels can be compiled on this machine."""
    return triton is not None


# exp(x) = exp2(x * LOG2_E), and GPUs have an instruction for exp2.
LOG2_E = 1.4426950408889634


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; that of an H200 if the device is not a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
