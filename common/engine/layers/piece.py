"""One read of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """A block of a checkpoint's tensor and the view of the model's storage that it fills, whose dtype it is converted
    to.

    Several pieces may read one tensor: parts of a merged projection, experts of a stack, a rank's shard.
    """

    name: str  # name of the tensor in the checkpoint
    into: Tensor
    whole: tuple[int, ...]  # shape of the tensor in the checkpoint
    begin: tuple[int, ...]  # index of the first value that is read, per axis
    # Returns pieces that fill the same storage, for checkpoints that have other tensors instead of `name`.
    instead: Callable[[Piece], Iterator[Piece]] | None = None
    plus: float = 0.0  # added to every value, in the dtype of `into`
    single: bool = False  # the tensor has one value, in any number of axes, for all of `into`
    # Fills the storage with the block that was read, instead of a copy into `into`.
    store: Callable[[Tensor], None] | None = None
    # Called with the tensor's name and the block that was read; raises ModelError for values that cannot be used.
    check: Callable[[str, Tensor], None] | None = None
    dtypes: tuple[str, ...] = ()  # the tensor's, as safetensors spells them; (): those that fit `into`
    read: tuple[int, ...] | None = None  # shape of the block, which `store` takes; None: that of `into`
    # Another rank reads it: here it is only expected in the checkpoint, and `into` is not filled.
    elsewhere: bool = False

    @classmethod
    def all_of(cls, name: str, into: Tensor, plus: float = 0.0) -> Piece:
        """Return a read of a whole tensor."""
        return cls(name, into, tuple(into.shape), (0,) * into.ndim, plus=plus)

    @classmethod
    def rows_of(cls, name: str, into: Tensor, begin: int, whole: int) -> Piece:
        """Return a read of consecutive rows, from `begin` on, of a tensor with `whole` rows."""
        shape = tuple(into.shape)
        return cls(name, into, (whole, *shape[1:]), (begin, *(0 for _ in shape[1:])))

    @classmethod
    def value_of(cls, name: str, into: Tensor) -> Piece:
        """Return a read of a tensor with a single value, with which `into` is filled."""
        return cls(name, into, (), (), single=True)

    def stored_as(self, names: Container[str]) -> Iterator[Piece]:
        """Yield the pieces that fill its storage from a checkpoint with the tensors `names`."""
        if self.instead is None or self.name in names:
            yield self
        else:
            yield from self.instead(self)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is the one that it reads."""
        return math.prod(shape) == 1 if self.single else shape == self.whole

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block that it reads."""
        return tuple(self.into.shape) if self.read is None else self.read

    @property
    def is_whole(self) -> bool:
        return self.single or self.shape == self.whole

    @property
    def block(self) -> tuple[slice, ...]:
        """The indices of the block that it reads."""
        return tuple(slice(at, at + size) for at, size in zip(self.begin, self.shape, strict=True))
