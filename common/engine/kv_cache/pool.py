"""The KV pool of one model: planes of pages in one flat buffer, addressable by byte for transfers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


class KvPool:
    """Keys and values of all layers: planes layer0.key, layer0.value, layer1.key ... in a flat uint8 buffer.

    Each plane is [num_pages, page_size, kv_heads, head_dim], contiguous, at its own byte offset. Page 0 is
    padding: it is zeroed here and never written afterwards. Several pools (target and draft) may share one
    `storage`.

    Args:
        storage: [bytes] uint8 on `device`, for example shared memory under `torch.frombuffer`; None allocates
            zeros.
        plane_offsets: byte offset of each of the 2 * num_layers planes in `storage`; None packs them.

    Raises:
        ValueError: an offset that is not aligned to the element size, or planes that overlap or leave the
            storage.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: Tensor | None = None,
        plane_offsets: Sequence[int] | None = None,
    ) -> None:
        if min(num_layers, kv_heads, head_dim, page_size) < 1 or num_pages < 2:
            raise ValueError(
                "a KV pool needs at least one layer, head and slot, and one page beside padding page 0"
            )
        self.num_layers = num_layers
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.device = torch.device(device)
        self.page_bytes = page_size * kv_heads * head_dim * dtype.itemsize  # of one plane
        self.plane_bytes = num_pages * self.page_bytes
        if plane_offsets is None:
            plane_offsets = [index * self.plane_bytes for index in range(2 * num_layers)]
        self.plane_offsets = tuple(plane_offsets)
        end = max(self.plane_offsets) + self.plane_bytes
        if storage is None:
            storage = torch.zeros(end, dtype=torch.uint8, device=self.device)
        self._check(storage, end)
        self.storage = storage
        shape = (num_pages, page_size, kv_heads, head_dim)
        self._planes = [
            storage[offset : offset + self.plane_bytes].view(dtype).view(shape)
            for offset in self.plane_offsets
        ]
        for plane in self._planes:
            plane[0].zero_()
        self._slots = self._all_slots()

    def _all_slots(self) -> list[Tensor]:
        """Views [planes, slots, elements] of all planes: one, where their offsets are evenly spaced."""
        elements, slots = self.kv_heads * self.head_dim, self.num_pages * self.page_size
        spaces = {b - a for a, b in pairwise(self.plane_offsets)}
        space = min(spaces)
        if len(spaces) > 1 or space < 0 or space % self.dtype.itemsize:
            return [plane.view(1, slots, elements) for plane in self._planes]
        flat = self.storage[self.plane_offsets[0] : self.plane_offsets[-1] + self.plane_bytes].view(
            self.dtype
        )
        shape = len(self._planes), slots, elements
        return [flat.as_strided(shape, (space // self.dtype.itemsize, elements, 1))]

    def _check(self, storage: Tensor, end: int) -> None:
        if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous():
            raise ValueError(f"storage must be flat uint8, found {storage.dtype} {tuple(storage.shape)}")
        if storage.device.type != self.device.type:
            raise ValueError(f"storage is on {storage.device}, the pool on {self.device}")
        if len(self.plane_offsets) != 2 * self.num_layers:
            raise ValueError(f"{len(self.plane_offsets)} plane offsets for {2 * self.num_layers} planes")
        if end > storage.numel() or min(self.plane_offsets) < 0:
            raise ValueError(f"planes end at byte {end}, the storage at {storage.numel()}")
        if any((storage.data_ptr() + offset) % self.dtype.itemsize for offset in self.plane_offsets):
            raise ValueError(f"plane offsets must be aligned to {self.dtype.itemsize} bytes")
        ordered = sorted(self.plane_offsets)
        if any(b - a < self.plane_bytes for a, b in pairwise(ordered)):
            raise ValueError(f"planes of {self.plane_bytes} bytes overlap: offsets {ordered}")

    def key(self, layer: int) -> Tensor:
        """[num_pages, page_size, kv_heads, head_dim] view."""
        return self._planes[2 * layer]

    def value(self, layer: int) -> Tensor:
        """[num_pages, page_size, kv_heads, head_dim] view."""
        return self._planes[2 * layer + 1]

    def copy_pages_out(self, pages: Sequence[int] | Tensor) -> Tensor:
        """Copy pages of all planes to the host: [planes, n, page_size, kv_heads, head_dim]."""
        index = self._index(pages)
        return torch.stack([plane.index_select(0, index) for plane in self._planes]).to("cpu")

    def copy_pages_in(self, pages: Sequence[int] | Tensor, backup: Tensor) -> None:
        """Write what `copy_pages_out` returned into `pages`, which may be other pages than it came from.

        Raises ValueError where the number of pages or the layout of `backup` differs.
        """
        index = self._index(pages)
        wanted = (len(self._planes), index.numel(), self.page_size, self.kv_heads, self.head_dim)
        if tuple(backup.shape) != wanted or backup.dtype != self.dtype:
            raise ValueError(
                f"backup is {backup.dtype} {tuple(backup.shape)}, the pages are {self.dtype} {wanted}"
            )
        on_device = backup.to(self.device)
        for plane, source in zip(self._planes, on_device, strict=True):
            plane.index_copy_(0, index, source)

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy slots source[i] to target[i] in all planes: [n] int64, page * page_size + offset; targets distinct.

        Everything is read before anything is written, so the two may overlap.
        """
        for planes in self._slots:
            planes.index_copy_(1, target, planes.index_select(1, source))

    def _index(self, pages: Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(pages, dtype=torch.int64).to(self.device)

    @property
    def bytes_per_token(self) -> int:
        return len(self._planes) * math.prod((self.kv_heads, self.head_dim, self.dtype.itemsize))
