"""Memory of a tape: which tensors share a storage, and the static memory that all recordings of a recorder share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class TapeMemory:
    """Static memory of all recordings of a recorder: the n-th storage of each recording is in the n-th chunk.

    The largest graph is captured first and sizes the chunks.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []  # [bytes] uint8
        self._next = 0
        self.nbytes = 0

    def restart(self) -> None:
        """Begin a new recording."""
        self._next = 0

    def adopt(self, group: Sequence[Tensor]) -> None:
        """Move tensors that share a storage, with their contents, into the next chunk."""
        old = torch.empty(0, dtype=torch.uint8).set_(group[0].untyped_storage())
        if self._next == len(self._chunks):
            self._chunks.append(torch.empty(0, dtype=torch.uint8))
        if self._chunks[self._next].nbytes < old.nbytes:
            self.nbytes += old.nbytes
            self._chunks[self._next] = torch.empty(old.nbytes, dtype=torch.uint8)
        chunk = self._chunks[self._next]
        chunk[: old.nbytes].copy_(old)
        for tensor in group:
            form = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.set_(chunk.untyped_storage(), *form)
        self._next += 1


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def is_whole(tensor: Tensor) -> bool:
    """Return whether copying the tensor copies everything that shares its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def writable(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return one element of each dimension that `like` (default: itself) expands; expanded tensors refuse copy_."""
    strides = (tensor if like is None else like).stride()
    if 0 not in strides:
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
