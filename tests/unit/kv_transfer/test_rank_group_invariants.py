"""Whatever happens in whatever order on the ranks of two nodes: pages are free only when no rank can write them.

A request ends exactly once on each side, no page is written after the decode node got it back, and once every rank has
had its turns nothing is left on any of them.
"""

from __future__ import annotations

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.errors import Overloaded, Unavailable
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.events import Arrived, Delivered, PagesFree, RoomFailed, TransferLost
from kv_transfer.transport.base import Region
from tests.fakes.loopback import Damage, Fault
from tests.unit.kv_transfer.group_rig import Nodes
from tests.unit.kv_transfer.shares import DST, DST_PAGES, FAMILIES, SRC, TOKENS, share, view, whole_planes

SPEC = PoolSpec(TOKENS, FAMILIES["gqa"])
SOURCE = whole_planes(SPEC, True, 1)
SIZES = st.sampled_from([1, 2, 4])
ROOMS = (1, 2)
PAGES = {1: DST[:3], 2: [4, 5, 8]}
ROUNDS = 30
DAMAGE: list[Damage] = ["none", "none", "none", "none", "fail", "corrupt", "stick"]

Step = tuple[str, int]
TURNS = ["prefill turn", "decode turn", "prefill turn", "decode turn", "turns"]
RARE = ["expect", "open", "abort", "cancel", "complete", "lose link", "unstick"]
steps = st.tuples(st.sampled_from([*TURNS * 8, *RARE]), st.integers(0, 3))


class Watch:
    """Runs steps, and checks what may happen to pages at any time."""

    def __init__(self, sizes: tuple[int, int], damage: list[Damage]) -> None:
        self.nodes = Nodes(SPEC, sizes, "loopback", SOURCE)
        assert self.nodes.fabric is not None
        self.fabric = self.nodes.fabric
        self.fabric.plan = lambda n: Fault(damage=damage[n] if n < len(damage) else "none")
        self.fabric.observers.append(self._written)
        self.owned: set[int] = set(range(DST_PAGES))  # pages that the node may use for anything
        self.expected: set[int] = set()
        self.opened: set[int] = set()
        self.seen = 0  # events of the decode node
        self.nodes.prefill.after = 1

    def _written(self, receiver: str, region: Region, start: int, length: int, generation: int) -> None:
        del receiver, length, generation
        if region is not Region.KV:
            return
        shape = self.nodes.decode.pools[0][1]
        for placed in shape.placed:
            if placed.offset <= start < placed.offset + placed.nbytes:
                page = (start - placed.offset) // placed.page_bytes
                assert page not in self.owned, f"page {page} was written after the node got it back"

    def run(self, step: Step) -> None:
        what, number = step
        if what in ("expect", "open", "abort", "cancel"):
            number = ROOMS[number % len(ROOMS)]
        nodes = self.nodes
        prefill, decode = nodes.prefill, nodes.decode
        if what == "prefill turn":
            prefill.turn(number % len(prefill.ranks))
        elif what == "decode turn":
            decode.turn(number % len(decode.receivers))
        elif what == "turns":
            nodes.turn()
        elif what == "expect" and number not in self.expected:
            self.expected.add(number)
            prefill.expect(number, decode.leader, SRC[:3])
        elif what == "open" and number not in self.opened:
            self._open(number)
        elif what == "abort":
            decode.node.abort(number, "aborted")
        elif what == "cancel":
            prefill.node.cancel(number, "cancelled", "cancelled")
        elif what == "complete":
            prefill.completed[number % len(prefill.ranks)] = 1
        elif what == "lose link":
            links = [link for each in decode.receivers for link in each.links.values()]
            if links:
                link = links[number % len(links)]
                next(each for each in decode.receivers if link in each.links.values()).link_lost(
                    link.incarnation
                )
        elif what == "unstick":
            self.fabric.unstick()
        self.settle()

    def _open(self, room: int) -> None:
        self.owned.difference_update(PAGES[room])
        try:
            self.nodes.decode.open(room, PAGES[room], held=0)
        except (Overloaded, Unavailable):
            self.owned.update(PAGES[room])
        else:
            self.opened.add(room)

    def settle(self) -> None:
        """Take back the pages of rooms that have ended on the decode node."""
        events = self.nodes.decode.events[self.seen :]
        self.seen += len(events)
        for event in events:
            if isinstance(event, Arrived | PagesFree):
                self.owned.update(PAGES[event.room])
            if isinstance(event, Arrived):
                self._expect_share(PAGES[event.room])

    def _expect_share(self, pages: list[int]) -> None:
        """Expect that every rank has its share of these pages when they have arrived."""
        for memory, shape in self.nodes.decode.pools:
            for placed, whole in zip(shape.placed, SOURCE, strict=True):
                wanted = share(placed.plane, whole, shape.tp_rank, shape.tp_size)
                assert (view(memory, placed)[pages] == wanted[SRC[:3]]).all()

    def end(self) -> None:
        """Let everything finish, then give up what is left, as a router does, and expect that nothing remains."""
        nodes = self.nodes
        nodes.prefill.completed = [1] * len(nodes.prefill.ranks)
        self._turns(0.0)
        for room in ROOMS:
            nodes.decode.node.abort(room, "the end")
            nodes.prefill.node.cancel(room, "the end", "the end")
        self._turns(1.0)
        assert nodes.holds_nothing()
        for room in ROOMS:
            self._ends_once(room)
        nodes.close()

    def _turns(self, seconds: float) -> None:
        """Let every rank have many turns, with so many seconds between them."""
        for _ in range(ROUNDS):
            self.fabric.unstick()
            self.nodes.turn()
            self.nodes.prefill.clock.now += seconds
            self.nodes.fabric_clock.now += seconds
            self.settle()

    def _ends_once(self, room: int) -> None:
        received = [event for event in self.nodes.decode.events if getattr(event, "room", 0) == room]
        kinds = [type(event) for event in received]
        if room in self.opened:
            assert kinds in ([Arrived], [PagesFree], [RoomFailed, PagesFree]), kinds
        sent = [event for event in self.nodes.prefill.events if getattr(event, "room", 0) == room]
        ends = sum(isinstance(event, Delivered | TransferLost) for event in sent)
        assert ends == (room in self.expected)


# Of two decode ranks, a write to one fails, and that to the other is still outstanding when more pages are sent.
@example((1, 2), ["fail", "stick"], True, [("prefill turn", 0)] * 20)
@example((1, 2), ["stick", "none", "none", "fail"], True, [("prefill turn", 0)] * 20)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(SIZES, SIZES),
    damage=st.lists(st.sampled_from(DAMAGE), max_size=16),
    begun=st.booleans(),
    script=st.lists(steps, min_size=20, max_size=80),
)
def test_pages_are_free_only_when_no_rank_can_write_them(
    sizes: tuple[int, int], damage: list[Damage], begun: bool, script: list[Step]
) -> None:
    watch = Watch(sizes, damage)
    start = [("expect", 0), ("open", 0), ("complete", 0), ("complete", 1)] if begun else []
    for step in [*start, *script]:
        watch.run(step)
    watch.end()
