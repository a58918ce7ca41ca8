"""An event loop that counts its callbacks, so that a test can act between any two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVarTuple

from tests.fakes.stepped_loop import SteppedLoop

Ts = TypeVarTuple("Ts")


class CountedLoop(SteppedLoop):
    """What would run in a thread runs in a callback, and a connection to a child process is one in memory.

    Attributes:
        steps: callbacks so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._due: dict[int, Callable[[], object]] = {}
        super().__init__()

    def after(self, steps: int, action: Callable[[], object]) -> None:
        """Call `action` before the callback that follows this many since the start."""
        self._due[steps] = action

    def forget(self) -> bool:
        """Call nothing that is still to come; return whether there was nothing."""
        happened = not self._due
        self._due.clear()
        return happened

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._step, callback, args, context=context)

    def _step(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        action = self._due.pop(self.steps, None)
        self.steps += 1
        if action is not None:
            action()
        callback(*args)

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], Any], *args: *Ts
    ) -> asyncio.Future[Any]:
        ended: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if ended.cancelled():
                return
            try:
                ended.set_result(func(*args))
            except Exception as error:
                ended.set_exception(error)

        self.call_soon(self.call_soon, run)
        return ended

    async def create_connection(
        self, protocol_factory: Callable[[], Any], *args: Any, sock: Any = None, **options: Any
    ) -> tuple[asyncio.Transport, Any]:
        """Connect a protocol with a StandIn, which is in the place of the socket."""
        await asyncio.sleep(0)
        protocol = protocol_factory()
        transport: asyncio.Transport = sock.connect(protocol)
        await asyncio.sleep(0)
        return transport, protocol
