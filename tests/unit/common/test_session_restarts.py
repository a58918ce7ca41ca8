"""Sessions between processes that restart and forget each other: the sender's owner hears of every loss."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from common.errors import ProtocolError
from common.ipc.session import MAX_PROBE_SECONDS, Frame, FrameKind, Session, read_header
from common.ipc.sessions import Sessions
from tests.fakes.clock import Clock

FRAMES, NBYTES = 20, 1 << 16
Said = tuple[int, int]  # (the sender's epoch or opening, the number of the message in it)


class Restarts(RuleBasedStateMachine):
    """One peer and one listening socket, each with its latest process, and the connection between them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(0.0)
        self.lives = 0
        self.epochs = 0
        self.there: deque[Frame] = deque()
        self.back: deque[Frame] = deque()
        self.said: dict[int, int] = {}  # epoch -> number of messages that `keep` accepted
        self.answered: dict[int, int] = {}  # the same by opening
        self.heard: list[Said] = []
        self.heard_back: list[Said] = []
        self.openings: dict[Session, int] = {}  # the listener's sessions that have said something
        self.opening_in: dict[int, int] = {}  # epoch -> the only opening that the peer has heard in it
        self.start_listener()
        self.start_peer()

    # -- both ends, as RouterSocket and Dealer drive them

    def start_peer(self) -> None:
        self.there.clear()
        self.back.clear()
        self.lives += 1
        self.peer = b"node/%d" % self.lives
        self.open_session()
        for frame in self.dialler.due(self.clock()):
            self.send(frame)

    def open_session(self) -> None:
        self.epochs += 1
        self.dialler = Session(self.epochs, 0, FRAMES, NBYTES, self.clock())

    def start_listener(self) -> None:
        self.there.clear()
        self.back.clear()
        self.sessions = Sessions(self.send_back, FRAMES, NBYTES)

    def send(self, frame: Frame) -> None:
        self.there.append(frame)

    def send_back(self, peer: bytes, frame: Frame) -> bool:
        if peer != self.peer:
            return False
        self.back.append(frame)
        return True

    def tend(self) -> None:
        for frame in self.dialler.due(self.clock()):
            self.send(frame)
        self.sessions.tend(self.clock())

    def take_there(self) -> None:
        header, payload = self.there.popleft()
        got = self.sessions.receive(self.peer, header, payload, self.clock())
        if got is not None:
            self.heard.append(parse(got))

    def take_back(self) -> None:
        header, payload = self.back.popleft()
        try:
            head = read_header(header, payload)
        except ProtocolError:
            return
        if head.epoch != self.dialler.epoch:
            return
        if head.kind is FrameKind.RESET or not self.dialler.continues(head):
            if self.dialler.established:
                self.open_session()
            return
        got = self.dialler.receive(head, payload, self.clock())
        if got is not None:
            self.heard_back.append(parse(got))
            opening = self.heard_back[-1][0]
            assert self.opening_in.setdefault(self.dialler.epoch, opening) == opening, "two in one epoch"

    # -- events

    @rule(full=st.booleans())
    def say(self, full: bool) -> None:
        """Send a message. `full`: the socket accepts nothing at the moment."""
        epoch = self.dialler.epoch
        number = self.said.get(epoch, 0)
        frame = self.dialler.keep(b"%d %d" % (epoch, number), self.clock())
        if frame is not None:
            self.said[epoch] = number + 1
            if not full:
                self.send(frame)

    @rule(full=st.booleans(), must_leave=st.booleans())
    def answer(self, full: bool, must_leave: bool) -> None:
        session = self.sessions.get(self.peer)
        if session is None:
            return
        opening = self.openings.setdefault(session, len(self.openings))
        number = self.answered.get(opening, 0)
        frame = session.keep(b"%d %d" % (opening, number), self.clock())
        if frame is None:
            return
        taken = not full and self.send_back(self.peer, frame)
        if must_leave and not taken:
            session.take_back()
            return
        self.sessions.mark(self.peer)
        self.answered[opening] = number + 1

    @rule(most=st.integers(1, 8))
    def listener_reads(self, most: int) -> None:
        self.sessions.tend(self.clock())
        for _ in range(min(most, len(self.there))):
            self.take_there()

    @rule(most=st.integers(1, 8))
    def peer_reads(self, most: int) -> None:
        for frame in self.dialler.due(self.clock()):
            self.send(frame)
        for _ in range(min(most, len(self.back))):
            self.take_back()

    @rule(quarters=st.integers(1, 8))
    def time_passes(self, quarters: int) -> None:
        self.clock.now += quarters * MAX_PROBE_SECONDS / 4

    @rule()
    def connection_breaks(self) -> None:
        self.there.clear()
        self.back.clear()
        self.send(self.dialler.probe(self.clock()))

    @precondition(lambda self: self.there)
    @rule(place=st.integers(0, 40))
    def frame_is_damaged(self, place: int) -> None:
        header, payload = self.there.pop()
        flipped = bytearray(header + payload)
        flipped[place % len(flipped)] ^= 1
        self.there.append((bytes(flipped[: len(header)]), bytes(flipped[len(header) :])))

    @rule(what=st.sampled_from(["peer", "peer under its routing id", "listener", "forgotten"]))
    def a_process_restarts(self, what: str) -> None:
        kept = self.peer
        if what == "peer":
            self.start_peer()
        elif what == "peer under its routing id":
            self.start_peer()
            self.peer = kept
        else:
            self.forget_peer(restarts=what == "listener")

    def forget_peer(self, restarts: bool) -> None:
        if not self.dialler.established:
            # The peer has not heard from this session, so the next one may receive the same messages.
            self.heard = [each for each in self.heard if each[0] != self.dialler.epoch]
        if restarts:
            self.start_listener()
            self.send(self.dialler.probe(self.clock()))
        else:
            self.sessions.forget(self.peer)

    # -- invariants

    def check(self) -> None:
        for heard, said in ((self.heard, self.said), (self.heard_back, self.answered)):
            assert heard == sorted(set(heard)), "twice, or out of order"
            for epoch in {each for each, _ in heard}:
                numbers = [number for each, number in heard if each == epoch]
                assert numbers == list(range(len(numbers))), "one is missing before a later one"
                assert len(numbers) <= said[epoch]

    def settle(self) -> None:
        """Let the network work and both ends send something, so that a forgotten session is detected."""
        for turn in range(40):
            if turn == 20:
                self.send(self.dialler.probe(self.clock()))
            self.tend()
            while self.there:
                self.take_there()
            while self.back:
                self.take_back()
            self.clock.now += MAX_PROBE_SECONDS / 2

    def teardown(self) -> None:
        self.check()
        self.settle()
        self.check()
        epoch = self.dialler.epoch
        listening = self.sessions.get(self.peer)
        assert listening is not None
        assert listening.epoch == epoch, "no end is left with a session that the other does not have"
        assert self.dialler.idle
        assert listening.idle
        # All lost messages belong to earlier epochs, whose end the owner of the connecting socket has seen.
        assert sum(each == epoch for each, _ in self.heard) == self.said.get(epoch, 0)
        opening = self.openings.get(listening, -1)
        assert sum(each == opening for each, _ in self.heard_back) == self.answered.get(opening, 0)


def parse(payload: bytes) -> Said:
    epoch, number = payload.split()
    return int(epoch), int(number)


Restarts.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestRestarts = Restarts.TestCase
