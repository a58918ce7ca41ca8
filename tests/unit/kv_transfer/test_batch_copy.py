"""Many copies by one call of the runtime, in the form of each CUDA version, and without it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer.transport.cuda.batch_copy import Addresses, BatchCopy
from kv_transfer.transport.cuda.cudart import CudaError

STREAM = 77


class Library:
    """A runtime library whose call copies host memory at once."""

    def __init__(self, major: int, status: int = 0) -> None:
        self.major = major
        self.status = status
        self.calls = 0

    def cudaMemcpyBatchAsync(self, *arguments: Any) -> int:
        """Take the arguments of the C function: CUDA 12 also returns the index of the copy that failed."""
        self.calls += 1
        if self.status:
            return self.status
        targets, sources, sizes, count, attributes, first, kinds, *failed, stream = arguments
        assert len(failed) == (1 if self.major == 12 else 0)
        assert (stream.value, kinds.value) == (STREAM, 1)
        read = ctypes.string_at(ctypes.addressof(attributes.contents), 24)
        assert np.frombuffer(read, np.int32).tolist() == [1, 0, 0, 0, 0, 1]
        assert ctypes.cast(first, ctypes.POINTER(ctypes.c_size_t)).contents.value == 0
        numbers = ctypes.c_int64 * count.value
        spans = [numbers.from_address(each.value) for each in (targets, sources, sizes)]
        for target, source, size in zip(*spans, strict=True):
            ctypes.memmove(target, source, size)
        return 0


def refuse(name: str, status: int) -> None:
    if status:
        raise CudaError(f"{name}: {status}")


def moves() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], tuple[Addresses, Addresses, Addresses]]:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    at = np.array([0, 40], dtype=np.int64)
    return source, target, (target.ctypes.data + at, source.ctypes.data + at + 8, np.array([4, 16]))


@pytest.mark.parametrize("major", [12, 13])
def test_one_call_copies_all(major: int) -> None:
    library = Library(major)
    batch = BatchCopy(library, major, refuse)
    source, target, spans = moves()
    assert batch.start(*spans, STREAM)
    assert library.calls == 1
    assert target[:4].tolist() == source[8:12].tolist()
    assert target[40:56].tolist() == source[48:64].tolist()
    assert not target[4:40].any()


def test_a_library_without_the_call() -> None:
    assert not BatchCopy(SimpleNamespace(), 12, refuse).start(*moves()[2], STREAM)


@pytest.mark.parametrize("status", [36, 801])
def test_a_driver_without_the_call_is_asked_once(status: int) -> None:
    library = Library(12, status)
    batch = BatchCopy(library, 12, refuse)
    assert [batch.start(*moves()[2], STREAM) for _ in range(3)] == [False] * 3
    assert library.calls == 1


def test_an_error_is_raised() -> None:
    with pytest.raises(CudaError, match="cudaMemcpyBatchAsync: 700"):
        BatchCopy(Library(13, 700), 13, refuse).start(*moves()[2], STREAM)
