"""Snapshots: saved states of cached prefixes, for models that keep a state per request.

Such a model can continue a cached prefix only where its state was saved. A snapshot is a state slot that holds the
state after the tokens of one node of the radix tree, from the root to the node's end.

Every snapshot slot is free, being written (a lease owns it until its prompt is committed), or attached to one node. A
snapshot that a lease is going to restore is pinned until the plan that copies it is launched: plans run in order, so
later ones may overwrite it. If no slot is free, the least recently used snapshot that is not pinned is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Snapshot:
    """One saved state; `slot` is 0 once it is dropped."""

    __slots__ = ("pins", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.pins = 0


class Snapshots:
    """The snapshot slots of a node."""

    def __init__(self, slots: Iterable[int] = ()) -> None:
        self._free = deque(slots)
        self._attached: dict[int, Snapshot] = {}  # slot -> snapshot, least recently used first
        self.total = len(self._free)

    @property
    def attached(self) -> int:
        """Number of snapshots that prompts can continue from."""
        return len(self._attached)

    @property
    def writing(self) -> int:
        """Number of slots that leases own. 0 when idle."""
        return self.total - len(self._free) - len(self._attached)

    def allocate(self) -> int:
        """Return a slot to save a state in; 0 if all are pinned or being written."""
        if not self._free:
            unused = next((each for each in self._attached.values() if not each.pins), None)
            if unused is None:
                return 0
            self.drop(unused)
        return self._free.popleft()

    def free(self, slots: Iterable[int]) -> None:
        """Take back slots that were allocated and not attached."""
        self._free.extend(slots)

    def attach(self, slot: int) -> Snapshot:
        """Return a snapshot of the state that was saved in an allocated slot."""
        made = self._attached[slot] = Snapshot(slot)
        return made

    def use(self, snapshot: Snapshot) -> None:
        """Mark a snapshot as the most recently used."""
        self._attached[snapshot.slot] = self._attached.pop(snapshot.slot)

    def pin(self, snapshot: Snapshot) -> None:
        """Keep a snapshot until the matching unpin."""
        self.use(snapshot)
        snapshot.pins += 1

    def unpin(self, snapshot: Snapshot) -> None:
        if not snapshot.pins:
            raise ValueError("unpin without pin")
        snapshot.pins -= 1

    def drop(self, snapshot: Snapshot) -> None:
        """Free the slot of a snapshot. Raises ValueError if it is pinned."""
        if snapshot.pins:
            raise ValueError(f"the snapshot in slot {snapshot.slot} is dropped while it is pinned")
        del self._attached[snapshot.slot]
        self._free.append(snapshot.slot)
        snapshot.slot = 0

    def check_integrity(self, in_tree: Iterable[Snapshot]) -> None:
        """Raise AssertionError unless the live snapshots of the tree are exactly the attached ones.

        `in_tree`: the snapshots of all nodes, dropped ones included.
        """
        live = [each for each in in_tree if each.slot]
        assert len(live) == len(self._attached), "a snapshot is in no node, or in two"
        assert all(self._attached.get(each.slot) is each for each in live), "a node has a stale snapshot"
        slots = [*self._free, *self._attached]
        assert len(set(slots)) == len(slots) <= self.total, "a snapshot slot is in two places"


class StateLease:
    """The state slot of a request, the snapshot that its prompt continues from, and slots for new snapshots."""

    __slots__ = ("_from", "_snapshots", "saves", "slot")

    def __init__(self, snapshots: Snapshots, slot: int, start: Snapshot | None) -> None:
        """`start`: the state after the cached prefix; pinned until `restored`."""
        self._snapshots = snapshots
        self._from = start
        self.slot = slot  # in the planes that are kept per request; 0: the model has none
        # (tokens, slot): the state after so many tokens of the request is to be saved in that slot
        self.saves: list[tuple[int, int]] = []
        if start is not None:
            snapshots.pin(start)

    @property
    def restore(self) -> int:
        """The slot whose state has to be copied to `slot` before the first chunk; 0: none, or no longer."""
        return 0 if self._from is None else self._from.slot

    def set_aside(self, borders: Iterable[int]) -> None:
        """Allocate slots to save the states after these numbers of tokens, as far as slots are left."""
        for tokens in borders:
            if slot := self._snapshots.allocate():
                self.saves.append((tokens, slot))

    def restored(self) -> None:
        """Note that the copy of the restored state is launched."""
        if self._from is not None:
            self._snapshots.unpin(self._from)
            self._from = None

    def skip(self, tokens: int) -> None:
        """Give up what depends on the first `tokens` tokens, whose state comes from elsewhere."""
        self.restored()
        self._snapshots.free(slot for at, slot in self.saves if at <= tokens)
        self.saves = [each for each in self.saves if each[0] > tokens]

    def saved(self, tokens: int) -> list[tuple[int, int]]:
        """Return `saves` of the first `tokens` tokens, which are computed; their slots are the caller's."""
        done = [each for each in self.saves if each[0] <= tokens]
        self.saves = [each for each in self.saves if each[0] > tokens]
        return done

    def release(self) -> None:
        """Give back the snapshots and the slots that nothing was committed to; `slot` is the caller's."""
        self.restored()
        self._snapshots.free(slot for _, slot in self.saves)
        self.saves = []
