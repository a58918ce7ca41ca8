"""One plane: the values that one layer stores under one name for every token, or for every request."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Final, Literal

import msgspec

ITEM_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

Owner = Literal["target", "draft"]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


class Kept(enum.StrEnum):
    """The unit of a plane's entries: a token or a request."""

    PAGED = "paged"  # per token: [num_pages, page_size, *entry]
    # Per request: [num_slots, *entry]; sent as a whole, once, after the last page.
    PER_REQUEST = "per_request"


class HeadGroup(msgspec.Struct, frozen=True, array_like=True):
    """A run of the sharded axis: `heads` heads of `width` values each. More ranks than heads replicate heads."""

    heads: Size
    width: Size


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """A function of the configs only, so equal on every rank. Raises ValueError unless its fields agree."""

    owner: Owner
    layer: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]  # the owner's layer
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]  # "k", "v", ...; unique within the layer
    kept: Kept
    # Shape of one entry over all ranks.
    entry: Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, max_length=4)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]  # a key of ITEM_BYTES
    axis: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0  # the sharded axis of `entry`
    # Runs of that axis, each divided among the ranks by heads; (): every rank holds the whole axis.
    groups: Annotated[tuple[HeadGroup, ...], msgspec.Meta(max_length=16)] = ()
    # What stored values are multiplied by; a power of two. 1 unless they are stored in eight bits.
    scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.where}: KV dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if self.axis >= len(self.entry):
            raise ValueError(f"{self.where}: axis {self.axis} of an entry with {len(self.entry)} axes")
        if math.frexp(self.scale)[0] != 0.5:
            raise ValueError(f"{self.where}: scale {self.scale} is not a power of two")
        covered = sum(group.heads * group.width for group in self.groups)
        if self.groups and covered != self.entry[self.axis]:
            raise ValueError(
                f"{self.where}: its groups hold {covered} values, axis {self.axis} has {self.entry[self.axis]}"
            )

    @property
    def where(self) -> str:
        """The plane's name in errors."""
        return f"{self.owner} layer {self.layer} {self.name}"

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return ITEM_BYTES[self.dtype]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry over all ranks, without replicas."""
        return math.prod(self.entry) * self.item_bytes


def attention_layer(owner: Owner, layer: int, kv_heads: int, head_dim: int, dtype: str) -> tuple[Plane, ...]:
    """Return keys and values of one attention layer: two paged planes, divided by KV heads."""
    heads = (HeadGroup(kv_heads, 1),)
    return tuple(
        Plane(owner, layer, name, Kept.PAGED, (kv_heads, head_dim), dtype, 0, heads) for name in ("k", "v")
    )
