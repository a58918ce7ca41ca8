"""The copies between device and host memory that a plan contains, and who carries them out. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec


class HostCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Copies pages, and states of models that keep one per request, in either direction."""

    pages: tuple[int, ...]
    host_pages: tuple[int, ...]  # as many, of the host's layout
    states: tuple[tuple[int, int], ...] = ()  # (state slot, slot of the host's layout)


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """Copies to host memory. What is copied must not change before `HostMemory.unfinished` no longer names the key."""

    key: int  # ascending
    copy: HostCopy


class HostFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Copies from host memory that no step of its plan needs. Its pages must not be read or reused before it ends."""

    key: int  # ascending
    copy: HostCopy


class Damage(NamedTuple):
    """Pages and slots of the host's layout whose bytes are not those that were stored."""

    pages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


INTACT = Damage()


class Comparison(Protocol):
    """The checksums of what the device got from host memory, compared with those of what was stored."""

    def follow(self) -> None:
        """Let all work launched from now on begin after the checksums are on the host."""
        ...

    def ready(self) -> bool:
        """Return at once whether they are."""
        ...

    def read(self) -> Damage:
        """Return what differs, once it is `ready`, or work that follows has ended."""
        ...


class NothingLoaded:
    """The comparison of a plan without loads."""

    def follow(self) -> None:
        pass

    def ready(self) -> bool:
        return True

    def read(self) -> Damage:
        return INTACT


NOTHING_LOADED = NothingLoaded()


class HostMemory(Protocol):
    """The interface of host memory for decisions about it."""

    def unfinished(self) -> Collection[int]:
        """Return the keys of applied stores whose copies have not ended. Does not wait."""
        ...


class HostCopies(Protocol):
    """Carries out the copies of a plan."""

    def store(self, stores: Sequence[Store], /) -> None: ...

    def load(self, loads: Sequence[HostCopy], /) -> Comparison:
        """Start copies that the next forward needs; it waits for them."""
        ...

    def close(self) -> None:
        """Wait for copies in flight, with a deadline, at the end of a node. No copy may be started after."""
        ...


class RankStore(HostMemory, HostCopies, Protocol):
    """The host memory of one rank; `HostStore` is one."""


class NoHostCopies:
    """The `RankStore` of a node without host memory: no plan copies anything."""

    def unfinished(self) -> Collection[int]:
        return ()

    def store(self, stores: Sequence[Store], /) -> None:
        pass

    def load(self, loads: Sequence[HostCopy], /) -> Comparison:
        return NOTHING_LOADED

    def close(self) -> None:
        pass
