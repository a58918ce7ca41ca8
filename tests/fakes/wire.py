"""A TCP relay in front of a port: tests cut, reset and corrupt the connections through it."""

from __future__ import annotations

import socket
import struct
import threading


class Wire:
    """The relay. Bytes on a connection that was cut are swallowed; new connections work."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = [self._listener]
        self._cuts: list[threading.Event] = []
        self._wanted, self._instead = b"", b""
        self.recorded = bytearray()  # bytes from connecting sides, up to a MiB
        self._flows: list[threading.Event] = []
        self.ended_by_target = 0  # connections that the target closed
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def connections(self) -> int:
        """Return the number of connections made so far."""
        return len(self._cuts)

    def cut(self) -> None:
        """Swallow all bytes on the current connections without telling either end."""
        for each in self._cuts:
            each.set()

    def withhold(self) -> None:
        """Hold back the bytes and ends of the current connections until `deliver`; new connections work."""
        for each in self._flows:
            each.clear()

    def deliver(self) -> None:
        """Pass on what was held back, in order."""
        for each in self._flows:
            each.set()

    def reset(self) -> None:
        """End the current connections with RST."""
        for end in self._ends[1:]:
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        del self._ends[1:]

    def replace(self, wanted: bytes, instead: bytes) -> None:
        """Replace bytes from the connecting side; both must have the same length."""
        self._wanted, self._instead = wanted, instead

    def close(self) -> None:
        # A thread that waits in `accept` is not woken by `close`, and would still take a later connection.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                # The target has ended: its peer may connect again and again.
                near.close()
                continue
            cut, flows = threading.Event(), threading.Event()
            flows.set()
            self._cuts.append(cut)
            self._flows.append(flows)
            self._ends += [near, far]
            threading.Thread(target=self._pump, args=(near, far, cut, flows, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, cut, flows, False), daemon=True).start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        cut: threading.Event,
        flows: threading.Event,
        there: bool,
    ) -> None:
        try:
            while data := source.recv(65536):
                if there and len(self.recorded) < 1 << 20:
                    self.recorded += data
                flows.wait()
                if there and self._wanted:
                    data = data.replace(self._wanted, self._instead)
                if not cut.is_set():
                    try:
                        sink.sendall(data)
                    except OSError:
                        if there:  # otherwise the target is still read until it ends
                            raise
            flows.wait()
            if not there:
                self.ended_by_target += 1
            if not cut.is_set():
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        finally:
            if not cut.is_set():
                source.close()
