"""Declares which blocks of a checkpoint's tensors make up a weight, and how ranks divide them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from common.engine.layers.piece import Piece
from common.kv_cache.plane import HeadGroup
from common.kv_cache.shard import Shard

# Values of an axis: a number of values that every rank has, or heads that are divided among the ranks.
Features: TypeAlias = int | HeadGroup


def head_group(features: Features) -> HeadGroup:
    """Return features as heads; values that every rank has are one head."""
    return HeadGroup(1, features) if isinstance(features, int) else features


class RowRun(NamedTuple):
    """Rows of a tensor in the checkpoint, head by head, that become consecutive rows of a weight.

    `together` heads are adjacent, and as many others begin `stride` rows later.
    """

    name: str  # without `.weight`
    group: HeadGroup
    whole: int  # number of rows of the tensor
    begin: int  # index of the first row of head 0
    together: int
    stride: int

    def ranges(self, heads: range) -> Iterator[range]:
        """Yield the rows of consecutive heads in the tensor, as few ranges as possible."""
        together, width, head = self.together, self.group.width, heads.start
        while head < heads.stop:
            bundle, within = divmod(head, together)
            count = min(heads.stop - head, together - within)
            begin = self.begin + bundle * self.stride + within * width
            yield range(begin, begin + count * width)
            head += count


def runs_of(name: str, *groups: HeadGroup, bundles: int = 1) -> list[RowRun]:
    """Return the rows of a tensor that holds these groups one after the other.

    Args:
        bundles: the tensor has this many such sequences, each with an equal share of the heads of every group.
    """
    stride = sum(group.heads * group.width for group in groups) // bundles
    runs, begin = [], 0
    for group in groups:
        together = group.heads // bundles
        runs.append(RowRun(name, group, bundles * stride, begin, together, stride))
        begin += together * group.width
    return runs


# The rows of a weight, in order: whole tensors with their number of rows, or runs of rows.
Parts: TypeAlias = Mapping[str, Features] | Sequence[RowRun]


class Columns(NamedTuple):
    """The inputs of a product that one rank reads."""

    size: int
    begin: int
    whole: int

    @property
    def divided(self) -> bool:
        return self.size < self.whole


class WeightBlock(NamedTuple):
    """A block of a matrix in the checkpoint that becomes consecutive rows of one rank's weight."""

    name: str  # without `.weight`
    rows: int
    begin: int  # index of the first row in the matrix
    whole: int  # number of rows of the matrix
    columns: Columns
    bias_elsewhere: bool = False  # the checkpoint has a bias for it, which another rank adds

    def weight(self, into: Tensor) -> Piece:
        """Return the read of this block of `NAME.weight` into [rows, columns]."""
        whole, begin = (self.whole, self.columns.whole), (self.begin, self.columns.begin)
        return Piece(f"{self.name}.weight", into, whole, begin)

    def per_row(self, suffix: str, into: Tensor) -> Piece:
        """Return the read of values per row, such as biases or scales, from `NAME.suffix`; `into` has `rows` rows."""
        return Piece.rows_of(f"{self.name}.{suffix}", into, self.begin, self.whole)

    def bias(self, into: Tensor | None, device: torch.device) -> Iterator[Piece]:
        """Yield the read of the bias into `rows` values; with None what the checkpoint has for another rank, if so."""
        if into is not None:
            yield self.per_row("bias", into)
        elif self.bias_elsewhere:
            nothing = torch.empty(0, device=device)
            yield Piece(f"{self.name}.bias", nothing, (self.whole,), (self.begin,), elsewhere=True)


def input_columns(inputs: Features, shard: Shard, what: str) -> Columns:
    """Return the columns of a product that a rank reads; `what` names the product in errors."""
    group = head_group(inputs)
    heads = shard.addends(group, what)
    return Columns(len(heads) * group.width, heads.start * group.width, group.heads * group.width)


def rank_blocks(parts: Parts, columns: Columns, shard: Shard) -> tuple[WeightBlock, ...]:
    """Return the blocks that one rank holds of the declared rows; adjacent rows of a tensor are one block."""
    blocks: list[WeightBlock] = []
    for run in declared_runs(parts):
        for rows in run.ranges(shard.heads(run.group, run.name)):
            last = blocks[-1] if blocks else None
            if last is not None and last.name == run.name and last.begin + last.rows == rows.start:
                blocks[-1] = last._replace(rows=last.rows + len(rows))
            else:
                blocks.append(WeightBlock(run.name, len(rows), rows.start, run.whole, columns))
    return tuple(blocks)


def declared_runs(parts: Parts) -> Iterator[RowRun]:
    """Yield the declared rows as runs."""
    if not isinstance(parts, Mapping):
        yield from parts
        return
    for name, features in parts.items():
        yield from runs_of(name, head_group(features))


def rows_of_parameter(parts: Parts, shard: Shard, suffix: str, into: Tensor) -> Iterator[Piece]:
    """Yield the reads of a rank's rows of a parameter that is not a matrix, from `NAME.suffix`."""
    start = 0
    for block in rank_blocks(parts, Columns(1, 0, 1), shard):
        yield block.per_row(suffix, into[start : start + block.rows])
        start += block.rows
