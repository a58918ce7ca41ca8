"""Connections without sockets: what one end writes is passed to a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class MemoryTransport(asyncio.Transport):
    """The transport of a protocol whose peer is in the same process.

    Attributes:
        slow: the peer reads a moment after every write, and nothing more fits until then.
        lost: the connection has ended, and the protocol knows.
    """

    def __init__(
        self,
        protocol: asyncio.BaseProtocol,
        written: Callable[[bytes], object],
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        """`written` takes what the protocol writes; `ended` is called when it closes the connection."""
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.slow = False
        self.lost = False
        self._protocol: Any = protocol
        self._loop = asyncio.get_running_loop()
        self._written, self._ended = written, ended
        self._closing = False
        protocol.connection_made(self)

    # ---- what the peer does

    def receive(self, data: bytes) -> None:
        """Let bytes of the peer arrive."""
        if not self._closing:
            self._protocol.data_received(data)

    def lose(self) -> None:
        """Let the connection end at once."""
        self._closing = True
        if not self.lost:
            self.lost = True
            self._protocol.connection_lost(None)

    def _read(self) -> None:
        if not self.lost:
            self._protocol.resume_writing()

    # ---- what the protocol does

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        self._written(bytes(data))
        if self.slow:
            self._protocol.pause_writing()
            self._loop.call_soon(self._loop.call_soon, self._read)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._ended()
            self._loop.call_soon(self.lose)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 1 << 20 if self.slow else 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass
