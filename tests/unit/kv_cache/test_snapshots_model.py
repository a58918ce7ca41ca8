"""Snapshots against a model of the device: what is copied from a slot is always the state of the cached prefix.

The model holds for each slot the tokens whose state a device would have there. Plans run in the order in which they are
launched: a restored state is read, and states are saved, when a request is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.kv_cache.page_space import PageLease, PageSpace, as_keys
from common.kv_cache.radix_cache import RadixCache, RadixNode
from common.kv_cache.snapshots import Snapshots

Prefix = tuple[int, ...]
SALTS = [b"", b"tenant"]


@dataclass
class Held:
    """A request: its lease, and whether its plan was launched."""

    lease: PageLease
    tokens: Prefix
    salt: bytes
    computed: bool = False


class SnapshotMachine(RuleBasedStateMachine):
    """Requests arrive, are computed, commit and leave in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.content: dict[int, tuple[bytes, Prefix]] = {}  # slot -> salt and tokens of the state in it

    @initialize(
        page_size=st.integers(1, 2),
        grid=st.integers(1, 3),
        pages=st.integers(2, 14),
        snapshots=st.integers(1, 4),
    )
    def start(self, page_size: int, grid: int, pages: int, snapshots: int) -> None:
        self.grid, self.slots = grid * page_size, range(4, 4 + snapshots)
        self.cache = RadixCache(page_size, Snapshots(self.slots))
        self.space = PageSpace(page_size, pages + 1, self.cache, num_slots=4, grid=self.grid)

    def saved(self) -> dict[tuple[bytes, Prefix], int]:
        """Return the snapshots of the tree: salt and prefix -> slot."""
        found: dict[tuple[bytes, Prefix], int] = {}
        stack: list[tuple[RadixNode, Prefix, bytes]] = [(self.cache.match(as_keys([])).node, (), b"")]
        while stack:
            node, prefix, salt = stack.pop()
            if node.snapshot is not None:
                found[salt, prefix] = node.snapshot.slot
            for child in node.children.values():
                stack.append((child, prefix + tuple(child.keys.tolist()), salt or child.salt))
        return found

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(SALTS))
    def lease(self, tokens: list[int], salt: bytes) -> None:
        prefix, before = tuple(tokens), self.saved()
        most = len(tokens) - 1
        usable = [len(known) for by, known in before if by == salt and known == prefix[: len(known)]]
        lease = self.space.lease(as_keys(tokens), self.space.pages_for(len(tokens)), most, salt)
        if lease is None:
            return
        assert lease.cached_tokens == max((each for each in usable if each <= most), default=0)
        if lease.cached_tokens:
            assert lease.state.restore == before[salt, prefix[: lease.cached_tokens]]
        for count, slot in lease.state.saves:
            assert lease.cached_tokens < count <= most
            assert count % self.grid == 0
            assert slot in self.slots
        self.held.append(Held(lease, prefix, salt))

    @precondition(lambda self: any(not each.computed for each in self.held))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([each for each in self.held if not each.computed]))
        state = held.lease.state
        if held.lease.cached_tokens:
            assert self.content[state.restore] == (held.salt, held.tokens[: held.lease.cached_tokens])
        for count, slot in state.saves:
            self.content[slot] = held.salt, held.tokens[:count]
        state.restored()
        held.computed = True

    @precondition(lambda self: any(each.computed for each in self.held))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([each for each in self.held if each.computed]))
        held.lease.commit(as_keys(held.tokens))
        assert held.lease.state.saves == []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        held.lease.release()

    @rule()
    def flush(self) -> None:
        if hasattr(self, "space"):
            self.space.flush()

    @invariant()
    def every_snapshot_is_the_state_of_its_prefix(self) -> None:
        if hasattr(self, "space"):
            self.space.check_integrity()
            for key, slot in self.saved().items():
                assert self.content[slot] == key

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        if not hasattr(self, "space"):
            return
        writing = [slot for held in self.held for _, slot in held.lease.state.saves]
        assert self.cache.snapshots.writing == len(writing)
        taken = [*writing, *self.saved().values()]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(self.slots)

    def teardown(self) -> None:
        for held in self.held:
            held.lease.release()
        if hasattr(self, "space"):
            assert self.cache.snapshots.writing == self.space.leased_slots == self.space.leased_pages == 0
            self.space.flush()
            assert self.cache.snapshots.attached == 0


TestSnapshots = SnapshotMachine.TestCase
TestSnapshots.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
