"""Tracks by ZMQ's events whether a connecting socket is connected; frames in flight are lost when it disconnects."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)  # as integers: pyzmq converts its enums at each call
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ConnectionWatch:
    """Watches one socket that has not connected yet.

    Connections within the process (inproc) count as always connected.
    """

    def __init__(self, watched: zmq.Socket[bytes], address: str, now: float) -> None:
        self._watched = watched
        self._monitor: zmq.Socket[bytes] | None = None
        self._lost_at: float | None = None
        self.met = False  # a listener has accepted the latest attempt, and its handshake has not succeeded
        if not address.startswith("inproc://"):
            self._monitor = watched.get_monitor_socket(_EVENTS)
            self._lost_at = now

    def reconnected(self, now: float) -> bool:
        """Process all events and return whether a connection was made since the last call."""
        made = False
        # Reading without a message would raise an exception, which costs three times as much as asking.
        while self._monitor is not None and int(self._monitor.getsockopt(EVENTS)) & READABLE:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_CLOSED):
                # The network has connected, and the handshake comes next; or it could not connect.
                self.met = event == zmq.EVENT_CONNECTED
                continue
            made = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._lost_at = None if made else self._lost_at or now
            self.met = self.met and not made
        return made

    def disconnected_for(self, now: float) -> float:
        """Return the seconds without a connection, as of the last call of `reconnected`."""
        return 0.0 if self._lost_at is None else now - self._lost_at

    def close(self) -> None:
        if self._monitor is not None:
            self._watched.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
