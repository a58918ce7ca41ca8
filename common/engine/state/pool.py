"""The KV pool of one model: its planes as tensors over one flat buffer, addressable by byte for transfers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from common.engine.host_copies import RowCopies, memory_for_copy, on_device
from common.kv_cache.plane import Kept, Owner
from common.kv_cache.pool_layout import PlacedPlane, PoolLayout


class KvPool:
    """The planes of `owner` in the pool that `layout` describes. Several pools may share one `storage`.

    Page 0 and state slot 0 are padding: they are zeroed here and hold only zeros afterwards.

    Args:
        storage: [bytes] uint8, for example shared memory under `torch.frombuffer`.

    Raises:
        ValueError: the layout has no planes of the owner, or storage is of another kind or smaller than the
            layout.
    """

    def __init__(self, layout: PoolLayout, owner: Owner, storage: Tensor) -> None:
        _check(layout, owner, storage)
        self.layout = layout
        self.storage = storage
        self.device = storage.device
        self.page_size = layout.page_size
        self.num_pages = layout.num_pages
        placed = layout.of(owner)
        self.num_layers = len({each.plane.layer for each in placed})
        self._planes = {(each.plane.layer, each.plane.name): self._view(each) for each in placed}
        self._by_layer: dict[int, dict[str, Tensor]] = {}
        for (layer, name), plane in self._planes.items():
            self._by_layer.setdefault(layer, {})[name] = plane
            plane[0].zero_()
        scales = {(each.plane.layer, each.plane.name): each.plane.scale for each in placed}
        self._scales = {
            layer: (scale, scales[layer, "v"]) for (layer, name), scale in scales.items() if name == "k"
        }
        self._paged = [each for each in placed if each.plane.kept is Kept.PAGED]
        self.page_bytes = sum(each.page_bytes for each in self._paged)  # one page over all planes
        self._groups = [
            [_copied(self._planes[each.plane.layer, each.plane.name]) for each in group]
            for group in _alike(self._paged)
        ]
        self._slots = [view for group in _alike(self._paged) for view in self._all_slots(group)]
        self._state = [
            self._planes[each.plane.layer, each.plane.name]
            for each in placed
            if each.plane.kept is Kept.PER_REQUEST
        ]
        self.state_bytes = sum(plane[0].nbytes for plane in self._state)  # one request over all planes

    @property
    def attention_layers(self) -> Sequence[int]:
        """The layers that keep keys and values, which all have the same shape."""
        return [layer for layer, name in self._planes if name == "k"]

    @property
    def attention_layer(self) -> int | None:
        """The first layer that keeps keys and values; None without any."""
        return next(iter(self.attention_layers), None)

    def planes(self, layer: int) -> Mapping[str, Tensor]:
        """Return one layer's planes by name: [num_pages, page_size, *entry], or [num_slots, *entry] per request."""
        return self._by_layer.get(layer, {})

    def key(self, layer: int) -> Tensor:
        """Return a [num_pages, page_size, kv_heads, head_dim] view."""
        return self._planes[layer, "k"]

    def value(self, layer: int) -> Tensor:
        """Return a [num_pages, page_size, kv_heads, head_dim] view."""
        return self._planes[layer, "v"]

    def scales(self, layer: int) -> tuple[float, float]:
        """Return what stored keys and stored values of a layer are multiplied by."""
        return self._scales[layer]

    def copy_pages_out(self, pages: Sequence[int], one_by_one: bool = False) -> list[Tensor]:
        """Copy pages of all paged planes to the host: [planes, n, page_size, *entry] per group of identical planes.

        On a GPU they are readable once the stream reaches this point.

        Args:
            one_by_one: take no memory of the device, but one launch per page and plane. Otherwise the device needs room
                for the pages of one plane.
        """
        index = None if one_by_one else on_device(pages, self.device)
        copies: list[Tensor] = []
        for group in self._groups:
            shape = (len(group), len(pages), *group[0].shape[1:])
            copies.append(memory_for_copy(shape, group[0].dtype, self.device))
            for target, plane in zip(copies[-1], group, strict=True):
                if index is not None:
                    target.copy_(plane.index_select(0, index), non_blocking=True)
                    continue
                for place, page in enumerate(pages):
                    target[place].copy_(plane[page], non_blocking=True)
        return copies

    @property
    def page_copies(self) -> list[int]:
        """Bytes per page of each tensor that `copy_pages_out` returns."""
        return [sum(plane[0].nbytes for plane in group) for group in self._groups]

    def copy_pages_in(self, pages: Sequence[int], backup: Sequence[Tensor], one_by_one: bool = False) -> None:
        """Write the result of `copy_pages_out` into `pages`, which may differ from the pages it came from.

        Raises ValueError if the number of pages or the layout of `backup` differs.

        Args:
            one_by_one: as for `copy_pages_out`.
        """
        index = None if one_by_one else on_device(pages, self.device)
        for group, copies in zip(self._groups, backup, strict=True):
            wanted = (len(group), len(pages), *group[0].shape[1:])
            if tuple(copies.shape) != wanted or copies.dtype != group[0].dtype:
                raise ValueError(
                    f"backup is {copies.dtype} {tuple(copies.shape)}, the pages are {group[0].dtype} {wanted}"
                )
            for plane, source in zip(group, copies, strict=True):
                if index is not None:
                    plane.index_copy_(0, index, source.to(self.device, non_blocking=True))
                    continue
                for place, page in enumerate(pages):
                    plane[page].copy_(source[place], non_blocking=True)

    @property
    def state_copies(self) -> RowCopies:
        """Copies of what one request keeps in addition to its pages: [*entry] of each per-request plane, by slot."""
        return RowCopies(self._state)

    def copy_states(self, source: Tensor, target: Tensor) -> None:
        """Copy what requests keep in slots source[i] to target[i]: [n] int64, disjoint, targets distinct."""
        for plane in self._state:
            plane.index_copy_(0, target, plane.index_select(0, source))

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy slots source[i] to target[i] in all planes: [n] int64, page * page_size + offset; targets distinct.

        All values are read before any is written, so source and target may overlap.
        """
        for slots in self._slots:
            slots.index_copy_(0, target, slots.index_select(0, source))

    def _view(self, placed: PlacedPlane) -> Tensor:
        flat = self.storage[placed.offset : placed.offset + placed.nbytes].view(_dtype(placed))
        tokens = (self.page_size,) if placed.plane.kept is Kept.PAGED else ()
        return flat.view(placed.items, *tokens, *placed.entry)

    def _all_slots(self, group: Sequence[PlacedPlane]) -> list[Tensor]:
        """Return views [slots, planes, values] of identical planes: one view if their offsets are evenly spaced.

        Slots come first because index_select over another dimension copies all of a view with gaps on the CPU.
        """
        first, last, slots = group[0], group[-1], self.num_pages * self.page_size
        spaces = {b.offset - a.offset for a, b in pairwise(group)} or {first.nbytes}
        if len(spaces) > 1:
            planes = (self._planes[each.plane.layer, each.plane.name] for each in group)
            return [_copied(plane).view(slots, 1, -1) for plane in planes]
        flat = self.storage[first.offset : last.offset + last.nbytes].view(_dtype(first))
        values = first.nbytes // first.plane.item_bytes // slots
        stride = spaces.pop() // first.plane.item_bytes
        return [_copied(flat).as_strided((slots, len(group), values), (values, stride, 1))]


def _alike(planes: Sequence[PlacedPlane]) -> Iterator[list[PlacedPlane]]:
    """Yield runs of neighbouring planes with the same dtype and shape."""
    for _, group in groupby(planes, lambda each: (each.plane.dtype, each.entry)):
        yield list(group)


def _copied(plane: Tensor) -> Tensor:
    """Return a view of the plane that every copy operation takes: torch lacks some for eight-bit floats."""
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane


def _dtype(placed: PlacedPlane) -> torch.dtype:
    dtype = getattr(torch, placed.plane.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check(layout: PoolLayout, owner: Owner, storage: Tensor) -> None:
    if not layout.of(owner):
        raise ValueError(f"the pool layout has no planes of the {owner}")
    if layout.num_pages < 2:
        raise ValueError("a KV pool needs one page besides padding page 0")
    if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous():
        raise ValueError(f"storage must be flat uint8, found {storage.dtype} {tuple(storage.shape)}")
    if storage.numel() < layout.total_bytes:
        raise ValueError(f"storage has {storage.numel()} bytes, the pool layout needs {layout.total_bytes}")
    largest = max(each.plane.item_bytes for each in layout.placed)
    if storage.data_ptr() % largest:
        raise ValueError(f"storage must be aligned to {largest} bytes")
