"""Sessions without sockets: whatever the network loses, flips or cuts, each message arrives once and in order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ProtocolError
from common.ipc.session import (
    ACK_FRAMES,
    ACK_SECONDS,
    GAP_SECONDS,
    MAX_PACKED,
    MAX_PACKED_BYTES,
    MAX_PROBE_SECONDS,
    PACK,
    PROBE_SECONDS,
    SMALL,
    Frame,
    FrameKind,
    Session,
    pack,
    packs,
    read_header,
    unpack,
)
from common.ipc.sessions import FORGET_SECONDS, UNVOUCHED_SECONDS, Sessions
from tests.fakes.clock import Clock

EPOCH, OPENING = 7, 3


def session(opens: bool = False, frames: int = 100, nbytes: int = 1 << 20) -> Session:
    return Session(EPOCH, 0 if opens else OPENING, frames, nbytes, 0.0)


class Link:
    """A connecting and a listening end, and the frames between them."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.dealer = session(opens=True)
        self.there: deque[Frame] = deque()  # frames to the listening end
        self.back: deque[Frame] = deque()
        self.sessions = Sessions(self._send_back, 100, 1 << 20)
        self.at_router: list[bytes] = []
        self.at_dealer: list[bytes] = []

    def _send_back(self, peer: bytes, frame: Frame) -> bool:
        self.back.append(frame)
        return True

    def say(self, payload: bytes) -> None:
        frame = self.dealer.keep(payload, self.clock())
        assert frame is not None
        self.there.append(frame)

    def answer(self, payload: bytes) -> None:
        found = self.sessions.get(b"peer")
        frame = None if found is None else found.keep(payload, self.clock())
        if frame is not None:
            self.sessions.mark(b"peer")
            self.back.append(frame)

    def turn(self) -> None:
        """Let both ends read their sockets once."""
        while self.there:
            header, payload = self.there.popleft()
            got = self.sessions.receive(b"peer", header, payload, self.clock())
            self.at_router += [] if got is None else [got]
        while self.back:
            header, payload = self.back.popleft()
            try:
                head = read_header(header, payload)
            except ProtocolError:
                continue
            if head.kind is not FrameKind.RESET and self.dealer.continues(head):
                got = self.dealer.receive(head, payload, self.clock())
                self.at_dealer += [] if got is None else [got]
        self.there.extend(self.dealer.due(self.clock()))
        self.sessions.tend(self.clock())

    def settle(self) -> None:
        """Let the network work and time pass."""
        for _ in range(40):
            self.turn()
            self.clock.now += MAX_PROBE_SECONDS / 4


def _flip(frame: Frame, place: int) -> Frame:
    whole = bytearray(frame[0] + frame[1])
    whole[place % len(whole)] ^= 1 << place % 8
    return bytes(whole[: len(frame[0])]), bytes(whole[len(frame[0]) :])


events = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 3)),
        st.tuples(st.just("answer"), st.integers(0, 3)),
        st.tuples(st.just("turn"), st.integers(0, 1)),
        st.tuples(st.just("lose there"), st.integers(0, 9)),
        st.tuples(st.just("lose back"), st.integers(0, 9)),
        st.tuples(st.just("flip there"), st.integers(0, 400)),
        st.tuples(st.just("flip back"), st.integers(0, 400)),
        st.tuples(st.just("wait"), st.integers(0, 4)),
        st.tuples(st.just("break"), st.just(0)),
    ),
    max_size=80,
)


@given(events)
@settings(max_examples=300, deadline=None)
def test_every_message_arrives_once_and_in_order(plan: list[tuple[str, int]]) -> None:
    link = Link()
    said: list[bytes] = []
    answered: list[bytes] = []
    for what, number in plan:
        lane = link.there if what.endswith("there") else link.back
        if what == "say":
            said.append(b"%d:%d" % (len(said), number))
            link.say(said[-1])
        elif what == "answer":
            if link.sessions.get(b"peer") is not None:
                answered.append(b"%d:%d" % (len(answered), number))
                link.answer(answered[-1])
        elif what == "turn":
            link.turn()
        elif what == "wait":
            link.clock.now += number * PROBE_SECONDS / 2
        elif what == "break":
            link.there.clear()
            link.back.clear()
        elif lane:
            if what.startswith("lose"):
                del lane[number % len(lane)]
            else:
                place = number % len(lane)
                lane[place] = _flip(lane[place], number)
        assert link.at_router == said[: len(link.at_router)]
        assert link.at_dealer == answered[: len(link.at_dealer)]
    link.settle()
    assert (link.at_router, link.at_dealer) == (said, answered)
    assert link.dealer.idle
    assert all(each.idle for each in link.sessions)


def test_elapsed_time_causes_no_resend() -> None:
    """A loop that is busy for seconds causes probes, but no prompt is sent again."""
    link = Link()
    link.settle()
    link.say(b"prompt" * 1000)
    sent = list(link.there)
    for _ in range(40):
        link.clock.now += MAX_PROBE_SECONDS
        link.there.extend(link.dealer.due(link.clock()))
    assert [frame for frame in link.there if frame[1]] == sent
    assert 20 < len(link.there) <= 41
    link.settle()
    assert link.at_router == [b"prompt" * 1000]
    assert link.dealer.sent_again == 0


def test_a_gap_is_reported_once() -> None:
    link = Link()
    link.settle()
    for number in range(20):
        link.say(b"%d" % number)
    del link.there[3]
    link.settle()
    [listening] = link.sessions
    assert listening.gaps == 1
    assert link.at_router == [b"%d" % number for number in range(20)]
    assert GAP_SECONDS > 0


def test_all_probes_of_a_silence_have_one_answer() -> None:
    """Each answer that names a gap would trigger a resend of everything that is kept."""
    link = Link()
    link.settle()
    link.say(b"lost")
    link.there.clear()
    for _ in range(10):
        link.clock.now += MAX_PROBE_SECONDS
        link.there.extend(link.dealer.due(link.clock()))
    assert len(link.there) == 10
    link.turn()
    assert [read_header(*each).kind for each in link.back] == [FrameKind.ACK]
    link.settle()
    assert link.at_router == [b"lost"]
    assert link.dealer.sent_again == 1


def test_acknowledgements_are_few() -> None:
    """Frames in the other direction carry them; a one-way stream needs one for many frames."""
    link = Link()
    link.settle()
    before = len(link.back)
    for number in range(ACK_FRAMES - 1):
        link.say(b"%d" % number)
    link.turn()
    assert len(link.back) == before
    link.say(b"one more")
    link.turn()
    assert len(link.back) == before + 1
    link.say(b"with an answer")
    link.turn()
    link.answer(b"yes")
    link.clock.now += 2 * ACK_SECONDS
    link.turn()
    assert len(link.back) == 0


def test_waiting_messages_are_bounded_by_number_and_bytes() -> None:
    few = session(frames=3)
    assert [few.keep(b"x", 0.0) is not None for _ in range(4)] == [True, True, True, False]
    large, small = bytes(SMALL), bytes(SMALL - 1)
    tight = session(nbytes=2 * SMALL)
    assert [tight.keep(large, 0.0) is not None for _ in range(3)] == [True, True, False]
    assert tight.keep(small, 0.0) is not None, "a small control message still passes"
    assert session(nbytes=1).keep(large, 0.0) is not None, "if nothing waits, a message of any size passes"


def test_a_message_that_could_not_be_sent_is_taken_back() -> None:
    ours = session()
    ours.keep(b"first", 0.0)
    second = ours.keep(b"second", 0.0)
    ours.take_back()
    assert ours.keep(b"another second", 0.0) != second
    assert read_header(*(ours.keep(b"third", 0.0) or (b"", b""))).number == 3


def test_a_pack_is_one_frame_and_is_sent_again_as_a_pack() -> None:
    ours, theirs = session(), session()
    messages = [b"one", b"", b"three"]
    lost = ours.keep(pack(messages), 0.0, PACK)
    later = ours.keep(b"later", 0.0)
    assert lost is not None
    assert later is not None
    assert theirs.receive(read_header(*later), later[1], 0.0) is None, "a gap"
    [report] = theirs.due(0.0)
    ours.receive(read_header(*report), b"", 0.0)
    again = [(read_header(*each), each[1]) for each in ours.due(0.0)]
    assert [head.kind for head, _ in again] == [FrameKind.PACK, FrameKind.DATA]
    got = [theirs.receive(head, payload, 0.0) for head, payload in again]
    assert unpack(got[0] or b"") == messages
    assert got[1] == b"later"


def test_messages_are_packed_in_order_and_small() -> None:
    assert list(packs([])) == []
    few = [b"x" * 100] * 3
    assert list(packs(few)) == [few]
    large = bytes(MAX_PACKED_BYTES)
    assert list(packs([b"a", large, b"b", b"c", large])) == [[b"a"], [large], [b"b", b"c"], [large]]
    many = [b"%d" % number for number in range(2 * MAX_PACKED + 1)]
    groups = list(packs(many))
    assert [each for group in groups for each in group] == many
    assert max(len(pack(group)) for group in [*groups, [bytes(MAX_PACKED_BYTES)]]) < SMALL


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc0", b"\x91\x01", b"\x92\xc4\x01x", b"\xdd\xff\xff\xff\xff", pack([b""] * (MAX_PACKED + 1))],
)
def test_a_payload_that_is_no_pack_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a pack of messages"):
        unpack(payload)


@pytest.mark.parametrize("header", [b"", b"x", bytes(40), bytes([9]) + bytes(39), bytes(100)])
def test_invalid_frames_are_refused(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_header(header, b"payload")


def test_an_unknown_peer_gets_a_reset() -> None:
    said: list[Frame] = []
    sessions = Sessions(lambda peer, frame: said.append(frame) is None, 10, 10)
    ours = session(opens=True)
    data = ours.keep(b"from an earlier life", 0.0)
    assert data is not None
    assert sessions.receive(b"peer", *data, 0.0) is None
    assert [read_header(*frame).kind for frame in said] == [FrameKind.RESET]
    assert read_header(*said[0]).epoch == EPOCH
    assert sessions.receive(b"peer", *said[0], 0.0) is None
    assert len(said) == 1, "a reset is not answered"
    assert len(sessions) == 0


def test_the_table_is_bounded_and_the_silent_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.ipc.sessions.MAX_SESSIONS", 3)
    sessions = Sessions(lambda peer, frame: True, 10, 10)
    for number in range(5):
        opening = session(opens=True).due(0.0)[0]
        sessions.receive(b"%d" % number, *opening, float(number))
        if number == 2:
            sessions.receive(b"0", *opening, 2.5)
    left = [number for number in range(5) if sessions.get(b"%d" % number) is not None]
    assert left == [0, 3, 4]
    assert len(sessions) == 3


def test_peers_that_are_vouched_for_make_room_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds however many unknown peers come, and however silent the known ones have been."""
    monkeypatch.setattr("common.ipc.sessions.MAX_SESSIONS", 3)
    sessions = Sessions(lambda peer, frame: True, 10, 10)

    def opens(peer: bytes, now: float) -> None:
        sessions.receive(peer, *session(opens=True).due(0.0)[0], now)

    opens(b"node", 0.0)
    sessions.vouch_for(b"node")
    sessions.vouch_for(b"nobody")
    for number in range(10):
        opens(b"%d" % number, 1.0 + number)
    assert sessions.get(b"node") is not None
    assert (len(sessions), sessions.get(b"9") is not None) == (3, True)
    sessions.forget(b"node")
    opens(b"node", 20.0)
    for number in range(3):
        opens(b"%d" % number, 21.0 + number)
    assert sessions.get(b"node") is None, "nobody vouches for it any more"
    for peer in (b"0", b"1", b"2"):
        sessions.vouch_for(peer)
    opens(b"one more", 30.0)
    assert len(sessions) == 4, "the table grows if all peers are vouched for"


def test_one_name_pushes_out_its_own_sessions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.ipc.sessions.SESSIONS_OF_A_NAME", 2)
    sessions = Sessions(lambda peer, frame: True, 10, 10)
    sessions.receive(b"decode-0/1", *session(opens=True).due(0.0)[0], 0.0)
    for number in range(9):
        sessions.receive(b"decode-1/%d" % number, *session(opens=True).due(0.0)[0], 1.0)
    assert len(sessions) == 3
    assert sessions.get(b"decode-0/1") is not None
    assert sessions.get(b"decode-1/6") is None
    assert sessions.get(b"decode-1/7") is not None
    for number in (7, 8):
        sessions.forget(b"decode-1/%d" % number)
    assert sessions.names == {"decode-0"}


def test_peers_that_are_no_longer_vouched_for_are_forgotten_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.ipc.sessions.MAX_SESSIONS", 2)
    sessions = Sessions(lambda peer, frame: True, 10, 10)
    for peer in (b"old", b"new"):
        sessions.receive(peer, *session(opens=True).due(0.0)[0], 0.0)
    sessions.vouch_only_for([b"old"])
    sessions.vouch_only_for([b"new", b"never heard"])
    sessions.receive(b"stranger", *session(opens=True).due(0.0)[0], 1.0)
    assert (sessions.get(b"old"), sessions.get(b"new") is not None) == (None, True)


@pytest.mark.parametrize(("vouched", "patience"), [(True, FORGET_SECONDS), (False, UNVOUCHED_SECONDS)])
def test_messages_for_an_unreachable_peer_are_eventually_dropped(vouched: bool, patience: float) -> None:
    sessions = Sessions(lambda peer, frame: False, 10, 10)
    sessions.receive(b"peer", *session(opens=True).due(0.0)[0], 0.0)
    found = sessions.get(b"peer")
    assert found is not None
    if vouched:
        sessions.vouch_for(b"peer")
    found.keep(b"x", 0.0)
    sessions.mark(b"peer")
    sessions.tend(patience - 1)
    assert sessions.get(b"peer") is found
    sessions.tend(patience + 1)
    assert len(sessions) == 0


def test_an_epoch_that_was_opened_again_is_not_continued() -> None:
    """OPEN came twice, and the listening side forgot its peer in between: earlier messages of the epoch are lost."""
    here, back = Clock(0.0), deque[Frame]()
    sessions = Sessions(lambda peer, frame: back.append(frame) is None, 10, 1 << 20)
    dealer = session(opens=True)
    opening = dealer.due(here())[0]
    here.now += PROBE_SECONDS
    again = dealer.due(here())[0]

    def answers(payload: bytes) -> Frame:
        listening = sessions.get(b"peer")
        assert listening is not None
        frame = listening.keep(payload, here())
        assert frame is not None
        return frame

    sessions.receive(b"peer", *opening, here())
    header, payload = answers(b"before")
    assert dealer.receive(read_header(header, payload), payload, here()) == b"before"
    sessions.forget(b"peer")
    sessions.receive(b"peer", *again, here())
    header, payload = answers(b"after")
    assert not dealer.continues(read_header(header, payload)), "else it would be dropped as a duplicate"

    # What the connecting side sends for the first opening of the epoch is answered with a RESET.
    back.clear()
    data = dealer.keep(b"to the first", here())
    assert data is not None
    assert sessions.receive(b"peer", *data, here()) is None
    assert [read_header(*frame).kind for frame in back] == [FrameKind.RESET]
