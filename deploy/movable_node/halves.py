"""Runs both halves of a movable node, each with its main loop in a thread of its own."""

from __future__ import annotations

import threading

import torch

from common.observability.logs import Log
from common.process import BuiltNode

# The error ends the process only once the other half has drained, which may take long.
FAILED = "half of this node has failed: the other one drains, then the process ends"


class Halves:
    """Implements `BuiltNode`. The process ends when either half ends."""

    def __init__(self, prefill: BuiltNode, decode: BuiltNode, device: torch.device, log: Log) -> None:
        self._prefill = prefill
        self._decode = decode
        self._device = device
        self._log = log
        self._running: list[BuiltNode] = [prefill, decode]
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._prefill.start()
        self._decode.start()

    def run(self) -> None:
        """Run both main loops until both have drained. If one fails, drain the other one and raise its error."""
        thread = threading.Thread(target=self._run_prefill, name="prefill")
        thread.start()
        try:
            self._decode.run()
        except BaseException:
            self._log.exception(FAILED, role="decode")
            raise
        finally:
            self._running.remove(self._decode)
            self._prefill.drain()
            thread.join()
        if self._failure is not None:
            raise self._failure

    def overdue(self) -> float:
        """Return the seconds by which the later of the running loops exceeds its announced work."""
        return max((each.overdue() for each in tuple(self._running)), default=0.0)

    def drain(self) -> None:
        self._prefill.drain()
        self._decode.drain()

    def close(self) -> None:
        self._decode.close()
        self._prefill.close()

    def _run_prefill(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device belongs to a thread
        try:
            self._prefill.run()
        except BaseException as error:
            self._log.exception(FAILED, role="prefill")
            self._failure = error
        finally:
            self._running.remove(self._prefill)
            self._decode.drain()
