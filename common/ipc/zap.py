"""Answers libzmq's authentication requests (ZAP, RFC 27) from the allow-list, in a thread of its own.

ZAP knows the key of a connection but not yet its routing id. The key therefore becomes the User-Id of the connection,
which libzmq attaches to every message: the socket compares the key's owner with the NAME of the routing id
(identity_check.py).
"""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

from common.errors import ConfigError
from common.ipc.allow_list import AllowList
from common.observability.bounded_log import BoundedLog

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"tandem"
_VERSION = b"1.0"
_FIELDS = 6  # version, request id, domain, address, routing id (of the listening socket), mechanism; then credentials
_KEY_BYTES = 32


class ZapHandler:
    """One handler per ZMQ context. Admits CURVE clients whose key is on the list and refuses everything else."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], allowed: AllowList, refusals: BoundedLog
    ) -> None:
        self._allowed = allowed
        self._refusals = refusals
        self._stop, stopped = (context.socket(zmq.PAIR) for _ in range(2))
        # The address is unique within the context, since the object's id is unique within the process.
        self._stop.bind(f"inproc://zap-stop-{id(self)}")
        stopped.connect(f"inproc://zap-stop-{id(self)}")
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._thread = threading.Thread(target=self._run, args=(stopped,), name="zap", daemon=True)
        try:
            self._socket.bind(ENDPOINT)
            self._thread.start()
        # RuntimeError: too many threads. A decode node may make its keys for the first transfer.
        except (zmq.ZMQError, RuntimeError) as error:
            taken = isinstance(error, zmq.ZMQError)
            if not taken:
                self._socket.unbind(ENDPOINT)  # a closed socket gives up its address some time later
            for each in (self._stop, stopped, self._socket):
                each.close(linger=0)
            problem = (
                "this ZMQ context already has a ZAP handler" if taken else f"keys cannot be checked: {error}"
            )
            raise ConfigError("", problem) from error

    def close(self) -> None:
        if self._stop.closed:
            return
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)

    def _run(self, stopped: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(stopped, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        try:
            while stopped not in dict(poller.poll()):
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        finally:
            self._socket.close()
            stopped.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Return [version, request id, status code, status text, user id, metadata]."""
        request_id = request[1] if len(request) > 1 else b""
        try:
            user, problem = self._check(request)
        # Without this thread nobody could connect any longer.
        except Exception as error:
            user, problem = "", f"the key could not be checked: {error!r}"
        if not user:
            address = request[3].decode(errors="replace") if len(request) > 3 else ""
            self._refusals.warning(address, problem)
        # 300 is "temporary": after a 400 libzmq's clients never try again, although a key may be installed later.
        code, text = (b"200", b"OK") if user else (b"300", b"refused")
        return [_VERSION, request_id, code, text, user.encode(), b""]

    def _check(self, request: list[bytes]) -> tuple[str, str]:
        """Return the user id of a client that may connect, or "" and the reason for refusing it."""
        if len(request) < _FIELDS or request[0] != _VERSION or request[2] != DOMAIN:
            return "", "not a ZAP request of this cluster's sockets"
        mechanism, credentials = request[5], request[6:]
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != _KEY_BYTES:
            return "", f"connected with {mechanism.decode(errors='replace')} and not with a key"
        key = z85.encode(credentials[0]).decode("ascii")
        if self._allowed.name_of(key) is None:
            return "", f"the key {key[:8]}... may not connect here"
        return key, ""
