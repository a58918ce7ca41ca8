"""The states of a transfer on either side and the allowed transitions between them.

    sender    expected ──> granted ──> finishing ──> recording ──> delivered
                 └────────────┴─────────────┴────────────┴──> draining ──> lost

    receiver  queued ──> awaiting ──> receiving ──> arrived ──> closed
                 │           └────────────┴──> quarantined ──┐
                 └───────────┴────────────┴──────────────────┴──> freed

A room is identified by (room, generation). A message whose generation differs from the room's own is stale: it is
counted and has no effect.
"""

from __future__ import annotations

import enum

from common.errors import InternalError


class SendState(enum.Enum):
    EXPECTED = "expected"  # the prompt has arrived, the slots have not
    GRANTED = "granted"  # pages may be sent
    FINISHING = "finishing"  # all pages are posted, the record waits until they have landed
    RECORDING = "recording"  # the record is posted
    DELIVERED = "delivered"
    DRAINING = "draining"  # failed or cancelled; writes may be outstanding
    LOST = "lost"


class ReceiveState(enum.Enum):
    QUEUED = "queued"  # the peer has not welcomed this node yet, so no slots have been sent
    AWAITING = "awaiting"  # slots are sent, nothing has landed
    RECEIVING = "receiving"  # pages land
    ARRIVED = "arrived"  # pages and record verified; the record slot is held until close
    QUARANTINED = "quarantined"  # given up, but the sender may still be writing
    CLOSED = "closed"
    FREED = "freed"


SEND_TRANSITIONS: dict[SendState, frozenset[SendState]] = {
    SendState.EXPECTED: frozenset({SendState.GRANTED, SendState.DRAINING}),
    SendState.GRANTED: frozenset({SendState.FINISHING, SendState.DRAINING}),
    SendState.FINISHING: frozenset({SendState.RECORDING, SendState.DRAINING}),
    SendState.RECORDING: frozenset({SendState.DELIVERED, SendState.DRAINING}),
    SendState.DRAINING: frozenset({SendState.LOST}),
    SendState.DELIVERED: frozenset(),
    SendState.LOST: frozenset(),
}

RECEIVE_TRANSITIONS: dict[ReceiveState, frozenset[ReceiveState]] = {
    ReceiveState.QUEUED: frozenset({ReceiveState.AWAITING, ReceiveState.FREED}),
    ReceiveState.AWAITING: frozenset(
        {ReceiveState.RECEIVING, ReceiveState.ARRIVED, ReceiveState.QUARANTINED, ReceiveState.FREED}
    ),
    ReceiveState.RECEIVING: frozenset(
        {ReceiveState.RECEIVING, ReceiveState.ARRIVED, ReceiveState.QUARANTINED, ReceiveState.FREED}
    ),
    ReceiveState.ARRIVED: frozenset({ReceiveState.CLOSED, ReceiveState.FREED}),
    ReceiveState.QUARANTINED: frozenset({ReceiveState.FREED}),
    ReceiveState.CLOSED: frozenset(),
    ReceiveState.FREED: frozenset(),
}


def send_step(room: int, old: SendState, new: SendState) -> SendState:
    """Return `new`. Raises InternalError if there is no transition from `old` to it."""
    if new not in SEND_TRANSITIONS[old]:
        raise InternalError(f"room {room}: a sender cannot go from {old.value} to {new.value}")
    return new


def receive_step(room: int, old: ReceiveState, new: ReceiveState) -> ReceiveState:
    """Return `new`. Raises InternalError if there is no transition from `old` to it."""
    if new not in RECEIVE_TRANSITIONS[old]:
        raise InternalError(f"room {room}: a receiver cannot go from {old.value} to {new.value}")
    return new
