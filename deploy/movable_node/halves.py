"""Runs both halves of a movable node, each with its main loop in a separate thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from common.errors import NodeRefused
from common.messages.identity import Role
from common.observability.logs import Log
from common.process import EXIT_DEFECT, BuiltNode


class Halves:
    """Implements `BuiltNode`. The process ends when either half ends."""

    def __init__(
        self,
        prefill: BuiltNode,
        decode: BuiltNode,
        device: torch.device,
        log: Log,
        begins: Callable[[Role], None] = lambda role: None,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Run `prefill` and `decode`.

        Args:
            begins: called with the role of each half, by the thread that is about to run its main loop.
            end_process: ends the process with an exit code at once, whatever its threads do.
        """
        self._prefill = prefill
        self._decode = decode
        self._device = device
        self._log = log
        self._begins = begins
        self._end_process = end_process
        self._running: list[BuiltNode] = [prefill, decode]
        self._refused: NodeRefused | None = None

    def start(self) -> None:
        self._prefill.start()
        self._decode.start()

    def run(self) -> None:
        """Run both main loops until both have drained. If one fails, the process ends at once.

        The other half could only drain, which may take long, and routers would wait for the failed one until its loop
        counts as hung. Once the process has ended, they see its sockets close, and place its requests again.

        Raises NodeRefused, after both have drained, if no router takes one of them.
        """
        thread = threading.Thread(target=self._run_prefill, name="prefill")
        thread.start()
        self._run_half("decode", self._decode, self._prefill)
        thread.join()
        if self._refused is not None:
            raise self._refused

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
        self._run_half("prefill", self._prefill, self._decode)

    def _run_half(self, role: Role, half: BuiltNode, other: BuiltNode) -> None:
        try:
            self._begins(role)
            half.run()
        except NodeRefused as error:
            self._log.error(
                "no router takes a half of this node: the other half drains", role=role, reason=str(error)
            )
            self._refused = error
        except BaseException:
            self._log.exception("half of this node has failed: the process ends", role=role)
            self._end_process(EXIT_DEFECT)
        finally:
            self._running.remove(half)
            other.drain()
