"""The copies between device and host memory that a plan contains, and who carries them out. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

Sums = dict[int, int]  # block or slot of host memory -> checksum of its bytes


class HostCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Copies pages, and states of models that keep one per request, in either direction."""

    pages: tuple[int, ...]
    host_pages: tuple[int, ...]  # as many, of the host's layout
    states: tuple[tuple[int, int], ...] = ()  # (state slot, slot of the host's layout)


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """Copies to host memory. What is copied must not change before `HostMemory.unfinished` no longer names the key."""

    key: int  # ascending
    copy: HostCopy


class Checksums(Protocol):
    """Checksums that are being computed."""

    def ready(self) -> bool: ...

    def read(self) -> tuple[Sums, Sums]:
        """Return the checksums of blocks and of slots, once they are ready."""
        ...


class HostMemory(Protocol):
    """The interface of host memory for decisions about it (host_tier.py)."""

    def unfinished(self) -> Collection[int]:
        """Return the keys of applied stores whose copies have not ended. Does not wait."""
        ...

    def check(self, blocks: Sequence[int], slots: Sequence[int]) -> Checksums:
        """Begin to compute the checksums of blocks and slots, which nothing writes meanwhile."""
        ...


class HostCopies(Protocol):
    """Carries out the copies of a plan."""

    def store(self, stores: Sequence[Store], /) -> None: ...

    def load(self, loads: Sequence[HostCopy], /) -> None:
        """Start copies that the next forward needs; it waits for them."""
        ...


class NoHostCopies:
    """A node without host memory: no plan copies anything."""

    def store(self, stores: Sequence[Store], /) -> None:
        pass

    def load(self, loads: Sequence[HostCopy], /) -> None:
        pass
