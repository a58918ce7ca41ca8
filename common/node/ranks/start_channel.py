"""The socket between rank 0 and another rank: messages while they start, then only the news that one has ended."""

from __future__ import annotations

import socket
import struct
import time
from typing import Generic, TypeVar

import msgspec

from common.errors import RankFailed
from common.node.ranks.messages import MAX_BYTES

LENGTH = struct.Struct("<I")
SEND_SECONDS = 60.0

Message = TypeVar("Message")


class StartChannel(Generic[Message]):
    """One end of a connected pair of stream sockets."""

    def __init__(self, connection: socket.socket, inbox: object, peer: int) -> None:
        """Receive messages of the union `inbox` from rank `peer`."""
        self._connection = connection
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(inbox)
        self._peer = peer

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises RankFailed if the peer has ended or does not read."""
        content = msgspec.msgpack.encode(message)
        try:
            self._connection.settimeout(SEND_SECONDS)
            self._connection.sendall(LENGTH.pack(len(content)) + content)
        except OSError as error:
            raise self._failed(f"takes no message: {error}") from error

    def receive(self, timeout: float) -> Message:
        """Return the next message. Raises RankFailed if the peer has ended or sends nothing for `timeout` seconds."""
        until = time.monotonic() + timeout
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size, until))
        if length > MAX_BYTES:
            raise self._failed(f"announces a message of {length} bytes, which no message has")
        return self._decoder.decode(self._exactly(length, until))

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, nbytes: int, until: float) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            try:
                self._connection.settimeout(max(until - time.monotonic(), 0.001))
                part = self._connection.recv(nbytes - len(parts))
            except TimeoutError:
                raise self._failed("has sent no message in time") from None
            except OSError as error:
                raise self._failed(f"has ended: {error}") from error
            if not part:
                raise self._failed("has ended")
            parts += part
        return bytes(parts)

    def _failed(self, problem: str) -> RankFailed:
        return RankFailed(self._peer, f"rank {self._peer} {problem}")
