"""How one rank's KV pool lies in memory, as a value that peers compare and the engine builds its pool from.

Storage is plane-major. A plane is the K or the V of one layer, [num_pages, page_size, kv_heads, head_dim]
contiguous; planes follow each other in one flat byte buffer: layer 0 k, layer 0 v, layer 1 k, ... target
layers first, draft layers after them. Target and draft share page indices, so one page id names one slice of
every plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

SHOWN = 12  # characters of a fingerprint, enough to tell two apart
PLANE_ALIGN = 4096  # bytes; planes start on memory pages, which every transport can register

ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


def head_range(total_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """Global KV heads of one rank: an even share, or one replicated head where ranks outnumber heads."""
    start = tp_rank * total_kv_heads // tp_size
    return range(start, start + max(1, total_kv_heads // tp_size))


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """The K or V of one layer."""

    layer: Offset
    kind: Literal["k", "v"]
    total_kv_heads: Size  # of the model
    kv_heads: Size  # of this rank
    head_dim: Size
    offset: Offset  # bytes from the start of the region
    page_bytes: Size  # page_size * kv_heads * head_dim * item size


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of one rank's pool. Made by `build`; what comes over the wire is checked for consistency."""

    model_fingerprint: Annotated[str, msgspec.Meta(max_length=256)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]  # a key of ITEM_BYTES
    page_size: Size  # tokens
    num_pages: Size
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=4096)]
    tp_rank: Offset = 0
    tp_size: Size = 1

    def __post_init__(self) -> None:
        """ValueError (which msgspec turns into a decode error) unless the numbers agree with each other."""
        item = ITEM_BYTES.get(self.dtype)
        if item is None:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank {self.tp_rank} is not below tp_size {self.tp_size}")
        end = 0
        for plane in self.planes:
            total, size = plane.total_kv_heads, self.tp_size
            if total % size and size % total:
                raise ValueError(f"{total} KV heads cannot be split over {size} ranks")
            if plane.kv_heads != len(head_range(total, self.tp_rank, size)):
                raise ValueError(
                    f"layer {plane.layer}: rank {self.tp_rank}/{size} cannot hold {plane.kv_heads} heads"
                )
            if plane.page_bytes != self.page_size * plane.kv_heads * plane.head_dim * item:
                raise ValueError(
                    f"layer {plane.layer}: page_bytes {plane.page_bytes} is not the size of a page"
                )
            if plane.offset < end or plane.offset % PLANE_ALIGN:
                raise ValueError(f"layer {plane.layer}: offset {plane.offset} overlaps or is not aligned")
            end = plane.offset + self.plane_bytes(plane)

    @classmethod
    def build(
        cls,
        fingerprint: str,
        dtype: str,
        page_size: int,
        num_pages: int,
        layers: Sequence[tuple[int, int]],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> KvLayout:
        """`layers` is (KV heads of the whole model, head_dim) per layer, target layers first, then draft.

        Raises ValueError where the heads cannot be split or the dtype is unknown.
        """
        planes: list[Plane] = []
        offset = 0
        for layer, (total, head_dim) in enumerate(layers):
            heads = len(head_range(total, tp_rank, tp_size))
            page_bytes = page_size * heads * head_dim * ITEM_BYTES.get(dtype, 1)
            kinds: tuple[Literal["k", "v"], ...] = ("k", "v")
            for kind in kinds:
                planes.append(Plane(layer, kind, total, heads, head_dim, offset, page_bytes))
                offset += _aligned(num_pages * page_bytes)
        return cls(
            model_fingerprint=fingerprint,
            dtype=dtype,
            page_size=page_size,
            num_pages=num_pages,
            planes=tuple(planes),
            tp_rank=tp_rank,
            tp_size=tp_size,
        )

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def total_bytes(self) -> int:
        """Size of the flat buffer that holds every plane."""
        return _aligned(self.planes[-1].offset + self.plane_bytes(self.planes[-1]))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all planes: what a page costs to hold and to send."""
        return sum(plane.page_bytes for plane in self.planes)

    def plane_bytes(self, plane: Plane) -> int:
        return self.num_pages * plane.page_bytes

    def shape(self, plane: Plane) -> tuple[int, int, int, int]:
        """[num_pages, page_size, kv_heads, head_dim] of the plane's elements."""
        return (self.num_pages, self.page_size, plane.kv_heads, plane.head_dim)

    def heads(self, plane: Plane) -> range:
        """Global indices of the heads that this rank holds."""
        return head_range(plane.total_kv_heads, self.tp_rank, self.tp_size)


def compatible(prefill: KvLayout, decode: KvLayout) -> str | None:
    """None when pages of `prefill` can be written into `decode`, else the sentence that both nodes log.

    Pool sizes, offsets and tensor-parallel sizes may differ; what gives bytes their meaning may not.
    """
    ours_target, ours_draft = _models(prefill.model_fingerprint)
    theirs_target, theirs_draft = _models(decode.model_fingerprint)
    for what, ours, theirs, remedy in (
        ("model", ours_target, theirs_target, "serve the same weights on both (model.path)"),
        (
            "draft model, or how it drafts,",
            ours_draft,
            theirs_draft,
            "set algorithm, draft_model_path, steps and topk of speculation alike on both",
        ),
        ("KV dtype", prefill.dtype, decode.dtype, "set the same model.dtype on both"),
        ("page size", prefill.page_size, decode.page_size, "set the same kv.page_size on both"),
        (
            "number of KV layers (target + draft)",
            len(prefill.planes) // 2,
            len(decode.planes) // 2,
            "configure the same model and the same drafter on both",
        ),
    ):
        if ours != theirs:
            shown = [value[:SHOWN] if isinstance(value, str) else value for value in (ours, theirs)]
            return f"{what} differs: prefill node has {shown[0]}, decode node has {shown[1]}; {remedy}"
    for a, b in zip(prefill.planes, decode.planes, strict=True):
        src = (a.layer, a.kind, a.total_kv_heads, a.head_dim)
        dst = (b.layer, b.kind, b.total_kv_heads, b.head_dim)
        if src != dst:
            return (
                f"KV of layer {a.layer} differs: prefill node has (layer, kind, heads, head_dim) {src}, "
                f"decode node has {dst}; configure the same model and the same drafter on both"
            )
    return None


def _models(fingerprint: str) -> tuple[str, str]:
    """Of target and draft, which stands behind a plus sign; "none" without one."""
    target, plus, draft = fingerprint.partition("+")
    return target, draft if plus else "none"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGN) * PLANE_ALIGN
