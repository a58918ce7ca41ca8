"""One call of the CUDA runtime for many copies: `cudaMemcpyBatchAsync`, which CUDA has since 12.8."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]

_NAME: Final = "cudaMemcpyBatchAsync"
_IN_STREAM_ORDER: Final = 1  # cudaMemcpySrcAccessOrderStream
_BESIDE_KERNELS: Final = 1  # cudaMemcpyFlagPreferOverlapWithCompute
# cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported: the library has the call, the driver does not
_WITHOUT: Final = frozenset({36, 801})
_FAILED_INDEX_UNTIL: Final = 12  # major versions whose call also returns the index of the copy that failed


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`; the hints of locations are for managed memory only."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """The call of one runtime library."""

    def __init__(self, library: Any, major: int, check: Callable[[str, int], None]) -> None:
        """`major`: version of the library; `check` raises for a status that is an error."""
        self._call = getattr(library, _NAME, None)
        self._major = major
        self._check = check

    def start(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> bool:
        """Start all copies on a stream other than the default one. Return False if that is not possible here."""
        if self._call is None:
            return False
        count = len(sizes)
        attributes = _Attributes(order=_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        status = self._call(
            *(ctypes.c_void_p(_data(each)) for each in (targets, sources, sizes)),
            ctypes.c_size_t(count),
            ctypes.pointer(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *([ctypes.byref(failed)] if self._major <= _FAILED_INDEX_UNTIL else ()),
            ctypes.c_void_p(stream),
        )
        if status in _WITHOUT:
            self.refuse()
            return False
        self._check(_NAME, status)
        return True

    def refuse(self) -> None:
        """Let `start` return False from now on."""
        self._call = None


def _data(numbers: Addresses) -> int:
    assert numbers.dtype == np.int64
    assert numbers.flags.c_contiguous
    return numbers.ctypes.data
