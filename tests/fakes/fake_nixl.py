"""A NIXL in one process: the part of `nixl_cu13` that the transport uses, with transfers that end as the test says.

As in the real library, a prepared list must lie in registered memory of its agent, its pieces must match the lengths of
the pieces they are written to, metadata names its agent, errors are raised, and a transfer in progress cannot be
stopped. Bytes arrive at the moment at which it ends.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np


class NixlRefusal(Exception):
    """Stands for nixlNotFoundError and its siblings."""


class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = 1


class Config:
    def __init__(self, **options: Any) -> None:
        self.options = options


class Transfer:
    def __init__(self, pieces: list[tuple[int, int, int]], peer: str) -> None:
        self.pieces = pieces  # (from, to, bytes)
        self.peer = peer
        self.posted = self.landed = self.released = False

    def land(self) -> None:
        if not self.landed:
            self.landed = True
            for source, target, nbytes in self.pieces:
                ctypes.memmove(target, source, nbytes)


class Prepared:
    def __init__(self, agent: str, pieces: list[tuple[int, int]]) -> None:
        self.agent = agent
        self.pieces = pieces  # (address, bytes)
        self.released = False


class FakeNixl:
    """The library, and the network between its agents."""

    nixl_thread_sync_t = nixl_thread_sync_t
    nixl_agent_config = Config

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.held = False  # transfers stay in progress
        self.fault = ""  # the error that checking a transfer raises
        self.refuse = ""  # the error that preparing a transfer raises
        self.transfers: list[Transfer] = []
        self.lists: list[Prepared] = []
        self.plugins = ["UCX"]

    def nixl_agent(self, name: str, config: Config) -> Agent:
        if name in self.agents:
            raise NixlRefusal("NIXL_ERR_NOT_ALLOWED")
        self.agents[name] = Agent(self, name, config)
        return self.agents[name]

    @property
    def under_way(self) -> list[Transfer]:
        return [each for each in self.transfers if each.posted and not each.released]


class Agent:
    def __init__(self, net: FakeNixl, name: str, config: Config) -> None:
        self.net = net
        self.name = name
        self.options = config.options
        self.backends = {each: 1 for each in config.options["backends"] if each in net.plugins}
        self.regions: list[tuple[int, int, int, str]] = []
        self.known: set[str] = set()
        self.rounds = 0

    def register_memory(
        self, regions: Sequence[tuple[int, int, int, str]], mem_type: str, backends: list[str]
    ) -> Any:
        ((address, nbytes, device, _),) = regions
        region = (address, nbytes, device, mem_type)
        self.regions.append(region)
        return region

    def deregister_memory(self, region: Any, backends: list[str]) -> None:
        self.regions.remove(region)

    def get_agent_metadata(self) -> bytes:
        return msgspec.msgpack.encode(self.name)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        try:
            name = msgspec.msgpack.decode(metadata, type=str)
        except msgspec.MsgspecError:
            raise NixlRefusal("NIXL_ERR_MISMATCH") from None
        if name not in self.net.agents:
            raise NixlRefusal("NIXL_ERR_BACKEND")
        self.known.add(name)
        return name.encode()

    def make_connection(self, name: str, backends: list[str]) -> None:
        assert name in self.known

    def remove_remote_agent(self, name: str) -> None:
        if name not in self.known:
            raise NixlRefusal("NIXL_ERR_NOT_FOUND")
        self.known.discard(name)

    def prep_xfer_dlist(self, name: str, rows: Any, mem_type: str, backends: list[str]) -> Prepared:
        assert rows.dtype == np.uint64
        owner = (
            self if name == "NIXL_INIT_AGENT" else self.net.agents.get(name) if name in self.known else None
        )
        if owner is None:
            raise NixlRefusal("NIXL_ERR_NOT_FOUND")
        pieces = []
        for address, nbytes, device, stride, count in rows.tolist():
            if not any(
                start <= address and address + stride * (count - 1) + nbytes <= start + size
                for start, size, where, kind in owner.regions
                if (where, kind) == (device, mem_type)
            ):
                raise NixlRefusal("NIXL_ERR_NOT_FOUND")
            pieces += [(address + i * stride, nbytes) for i in range(count)]
        prepared = Prepared(name, pieces)
        self.net.lists.append(prepared)
        return prepared

    def release_dlist_handle(self, prepared: Prepared) -> None:
        assert not prepared.released
        prepared.released = True
        self.net.lists.remove(prepared)

    def make_prepped_xfer(
        self, what: str, ours: Prepared, from_: Any, theirs: Prepared, to: Any, backends: list[str]
    ) -> Transfer:
        assert what == "WRITE"
        assert from_.dtype == to.dtype == np.int32
        assert not ours.released
        assert not theirs.released
        if self.net.refuse or theirs.agent not in self.known or len(from_) != len(to):
            raise NixlRefusal(self.net.refuse or "NIXL_ERR_INVALID_PARAM")
        pieces = []
        for a, b in zip(from_.tolist(), to.tolist(), strict=True):
            (source, nbytes), (target, room) = ours.pieces[a], theirs.pieces[b]
            if nbytes != room:
                raise NixlRefusal("NIXL_ERR_INVALID_PARAM")
            pieces.append((source, target, nbytes))
        transfer = Transfer(pieces, theirs.agent)
        self.net.transfers.append(transfer)
        return transfer

    def transfer(self, transfer: Transfer) -> str:
        transfer.posted = True
        return self._state(transfer)

    def check_xfer_state(self, transfer: Transfer) -> str:
        assert not transfer.released
        return self._state(transfer)

    def _state(self, transfer: Transfer) -> str:
        if self.net.fault:
            raise NixlRefusal(self.net.fault)
        if self.net.held:
            return "PROC"
        transfer.land()
        return "DONE"

    def release_xfer_handle(self, transfer: Transfer) -> None:
        assert not transfer.released
        assert not self.net.held, "released while it was under way"
        transfer.released = True

    def get_new_notifs(self, backends: list[str]) -> dict[str, list[bytes]]:
        self.rounds += 1
        return {}
