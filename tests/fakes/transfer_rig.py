"""A Receiver in this process and a Sender in another, over any transport, for GPU tests and the transfer benchmark."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from common.config.transports import transport_kind
from common.kv_cache.pool_spec import PoolSpec
from common.messages.identity import rank_incarnation
from kv_transfer.events import Arrived, ReceiverEvent
from kv_transfer.handoff_record import record_bytes
from kv_transfer.limits import TransferLimits
from kv_transfer.receiver import Receiver
from kv_transfer.transport.base import ReceiverEndpoint, ReceiverSetup, Region
from kv_transfer.transport.cuda.pool_memory import as_storage
from kv_transfer.transport.transport_registry import make_receiver
from tests.fakes.transfer_child import build_layout, make_current
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
SEED = 12345


def start_child(config: dict[str, Any], **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fakes.transfer_child", json.dumps(config)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


class Rig:
    """The two ends. `devices` and tensor-parallel `ranks` (rank, size) are those of sender and receiver.

    `arrived` holds the time at which each room arrived.

    Args:
        layers: (KV heads, head_dim) of the attention layers.
        spec: planes instead of those of `layers`, with `slots` slots of those that are kept per request.
    """

    def __init__(
        self,
        transport: str,
        devices: tuple[str, str] = ("cpu", "cpu"),
        *,
        layers: Sequence[tuple[int, int]] = ((8, 128),) * 4,
        pages: tuple[int, int] = (64, 96),
        page_size: int = 16,
        checksums: bool = True,
        ranks: tuple[tuple[int, int], tuple[int, int]] = ((0, 1), (0, 1)),
        spec: PoolSpec | None = None,
        slots: int = 2,
        checks_later: bool = False,
    ) -> None:
        self.directory = tempfile.mkdtemp(prefix="tandem-rig-")
        limits = TransferLimits(record_bytes=record_bytes(pages[1]), verify_checksums=checksums)
        nodes = [secrets.token_hex(16), secrets.token_hex(16)]  # incarnations
        self.config: dict[str, Any] = {
            "role": "send",
            "transport": transport,
            "device": devices[0],
            "directory": self.directory,
            "sender": rank_incarnation(nodes[0], ranks[0][0]),
            "receiver": rank_incarnation(nodes[1], ranks[1][0]),
            "nodes": nodes,
            "dtype": "bfloat16",
            "page_size": page_size,
            "layers": [list(layer) for layer in layers],
            "spec": msgspec.to_builtins(spec),
            "slots": slots,
            "src_pages": pages[0],
            "dst_pages": pages[1],
            "seed": SEED,
            "ranks": {"src": list(ranks[0]), "dst": list(ranks[1])},
            "limits": msgspec.to_builtins(limits),
        }
        self.src = build_layout(self.config, pages[0])
        self.dst = build_layout(self.config, pages[1], "dst")
        context = zmq.Context[zmq.Socket[bytes]]()
        self.context = context
        self.frames, self.commands = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.frames.bind(f"ipc://{self.directory}/frames")
        self.commands.bind(f"ipc://{self.directory}/commands")
        self.poller = zmq.Poller()
        self.poller.register(self.frames, zmq.POLLIN)
        self.poller.register(self.commands, zmq.POLLIN)
        self.child = start_child(self.config)
        self.endpoint = self._endpoint(transport, devices[1], limits)
        self.storage = as_storage(self.endpoint.allocate(Region.KV, self.dst.total_bytes))
        self.receiver = Receiver(
            nodes[1], "decode-0", self.endpoint, self.dst, time.monotonic, limits, 8, checks_later
        )
        self.events: list[ReceiverEvent] = []
        self.arrived: dict[int, float] = {}
        self.replies: list[dict[str, Any]] = []
        self.next_room = 1
        self.reply()
        self.receiver.connect(self.config["sender"], self._send)

    def _send(self, frame: bytes) -> bool:
        try:
            self.frames.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # the sending process has ended
            return False
        return True

    def _endpoint(self, transport: str, device: str, limits: TransferLimits) -> ReceiverEndpoint:
        kind, gpu = transport_kind(transport), make_current(device)
        setup = ReceiverSetup(self.config["receiver"], kind.options(), limits, "127.0.0.1", 0, gpu)
        return make_receiver(kind.receiver, setup)

    def turn(self) -> None:
        """Run one turn of a decode node's loop: wait for input, process frames and events."""
        self.poller.poll(1)
        while self.frames.poll(0):
            self.receiver.handle(self.config["sender"], self.frames.recv())
        for event in self.receiver.poll():
            self.events.append(event)
            if isinstance(event, Arrived):
                self.arrived[event.room] = time.monotonic()
        while self.commands.poll(0):
            self.replies.append(json.loads(self.commands.recv()))

    def reply(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """Return the child's next answer; the receiver keeps running while waiting."""
        until = time.monotonic() + timeout
        while not self.replies:
            self.turn()
            if self.child.poll() is not None:
                raise RuntimeError(f"the sending process ended with {self.child.returncode}")
            if time.monotonic() > until:
                raise TimeoutError(f"no answer; events {self.events}")
        return self.replies.pop(0)

    def tell(self, do: str, **arguments: Any) -> None:
        self.commands.send(json.dumps({"do": do, **arguments}).encode())

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.reply()

    def send_room(self, src: Sequence[int], dst: Sequence[int], **how: Any) -> dict[str, Any]:
        """Transfer one room until Arrived or failure. Returns the child's times, plus "arrived".

        `told`: number of layers that the child announces while it computes these pages. `queued`: the copies of the
        others are launched before that forward has ended. `slot`: the state slot, on both sides, of a spec that has
        per-request planes.
        """
        room, self.next_room = self.next_room, self.next_room + 1
        self.receiver.open(room, (self.config["sender"],), dst, 0, state_slot=how.get("slot", 0))
        found = self.ask("room", room=room, src=list(src), **how)
        until = time.monotonic() + PATIENCE
        while room not in self.arrived and time.monotonic() < until and not found["lost"]:
            self.turn()
        self.receiver.close(room)
        return {**found, "arrived": self.arrived.get(room)}

    def close(self) -> None:
        if self.child.poll() is None:
            self.tell("exit")
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        self.receiver.shutdown()
        self.context.destroy(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)
