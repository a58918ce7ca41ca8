"""One end of a transfer as a process of its own: `python -m tests.fakes.transfer_child CONFIG_JSON`.

A sender serves commands (JSON on a ZMQ pair socket) and frames (on another one); a receiver prints its description and
sleeps. `transfer_rig` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import zmq

from common.config.transports import transport_kind
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.events import Delivered, SlotsGranted, TransferLost
from kv_transfer.handoff_record import HandoffRecord
from kv_transfer.layer_send import RoomPages
from kv_transfer.limits import TransferLimits
from kv_transfer.pair_plan import pair_plan
from kv_transfer.sender import Sender
from kv_transfer.transport.base import PageList, Region, SenderSetup, WriteState
from kv_transfer.transport.cuda.pool_memory import as_memory
from kv_transfer.transport.cuda_ipc.receiver import CudaIpcReceiver
from kv_transfer.transport.cuda_ipc.sender import CudaIpcSender
from kv_transfer.transport.layers import LayerEndpoint, LayerWrite
from kv_transfer.transport.transport_registry import make_sender
from tests.fakes.pools import layers_layout


def pattern(nbytes: int, seed: int, device: torch.device | str) -> torch.Tensor:
    """Return uint8 [nbytes], the same on every device; no two pages are equal."""
    words = torch.arange(nbytes // 8, dtype=torch.int64, device=device)
    return ((words + seed) * 0x1E3779B97F4A7C15).view(torch.uint8)


def build_layout(config: dict[str, Any], num_pages: int, side: str = "src") -> PoolLayout:
    ranks = config.get("ranks", {}).get(side, (0, 1))
    if config.get("spec") is not None:
        spec, (rank, size) = msgspec.convert(config["spec"], PoolSpec), ranks
        return PoolLayout(
            fingerprint="m",
            spec=spec,
            num_pages=num_pages,
            num_slots=config["slots"] if spec.state_bytes else 0,
            tp_rank=rank,
            tp_size=size,
        )
    layers = [tuple(layer) for layer in config["layers"]]
    return layers_layout("m", config["dtype"], config["page_size"], num_pages, layers, *ranks)


def make_current(name: str) -> int | None:
    """Make a GPU the current device and return its ordinal; None on a CPU."""
    device = torch.device(name)
    if device.type == "cpu":
        return None
    torch.cuda.set_device(device)
    return torch.cuda.current_device()


def _sends(write: LayerWrite) -> Callable[[int], None]:
    return lambda layer: write.send(range(2 * layer, 2 * layer + 2))


class Forward:
    """As much work per layer as the 8B shape takes on a GPU (218 M weights); almost none on a CPU."""

    def __init__(self, device: torch.device, layers: int, tokens: int) -> None:
        cuda = device.type == "cuda"
        wide, deep = (53_248, 4_096) if cuda else (64, 64)
        dtype = torch.bfloat16 if cuda else torch.float32
        self._rows = torch.randn(tokens, deep, dtype=dtype, device=device)
        self._weight = torch.randn(wide, deep, dtype=dtype, device=device)
        self._out = torch.empty(tokens, wide, dtype=dtype, device=device)
        self._layers = layers

    def run(self, stored: Callable[[int], None]) -> None:
        for layer in range(self._layers):
            stored(layer)
            torch.mm(self._rows, self._weight.T, out=self._out)

    def wait(self) -> None:
        if self._out.is_cuda:
            torch.cuda.current_stream().synchronize()


class SenderChild:
    def __init__(self, config: dict[str, Any]) -> None:
        context = zmq.Context[zmq.Socket[bytes]]()
        self.frames, self.commands = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self.frames.connect(f"ipc://{config['directory']}/frames")
        self.commands.connect(f"ipc://{config['directory']}/commands")
        limits = TransferLimits(**config["limits"])
        layout = build_layout(config, config["src_pages"])
        self.storage = pattern(layout.total_bytes, config["seed"], config["device"])
        if make_current(config["device"]) is not None:
            torch.cuda.synchronize()
        kind = transport_kind(config["transport"])
        self.endpoint = make_sender(kind.sender, SenderSetup(config["sender"], kind.options(), limits))
        self.limits = limits
        self.endpoint.register(layout, as_memory(self.storage))
        self.sender = Sender(
            config["nodes"][0], "prefill-0", self.endpoint, layout, self._send, time.monotonic, limits
        )
        self.rooms: dict[int, dict[str, Any]] = {}

    def _send(self, peer: bytes, frame: bytes) -> bool:
        self.frames.send(frame)
        return True

    def run(self) -> None:
        """Serve until the end command, or until the parent is gone."""
        parent = os.getppid()
        self._reply({"up": True})
        poller = zmq.Poller()
        poller.register(self.frames, zmq.POLLIN)
        poller.register(self.commands, zmq.POLLIN)
        while os.getppid() == parent:
            ready = dict(poller.poll(0 if self.sender.poll_interval is not None else 2))
            if self.frames in ready:
                self.sender.handle(b"decode-0", self.frames.recv())
            if self.commands in ready:
                command = json.loads(self.commands.recv())
                if command["do"] == "exit":
                    return
                getattr(self, command["do"])(command)
            for event in self.sender.poll():
                self._event(event)

    def room(self, command: dict[str, Any]) -> None:
        self.rooms[command["room"]] = command
        self.sender.expect(command["room"])

    def _event(self, event: SlotsGranted | Delivered | TransferLost) -> None:
        command = self.rooms[event.room]
        if isinstance(event, SlotsGranted):
            command["begun"] = time.monotonic()
            if "told" in command:
                self._compute(event.room, command["src"], command["told"], command.get("queued", False))
            else:
                self.sender.send_pages(event.room, command["src"], 0)
            command["posted"] = time.monotonic()
            record = HandoffRecord(first_token=7, num_tokens=9)
            self.sender.finish(event.room, record, command.get("slot", 0))
            return
        command["ended"] = time.monotonic()
        del command["src"]
        command["lost"] = event.reason if isinstance(event, TransferLost) else ""
        self._reply(command)

    def _compute(self, room: int, src: list[int], told: int, queued: bool) -> None:
        """Run a forward that stores the pool's bytes layer by layer, slowly, and announces the first `told` layers.

        `queued`: the copies of the others are launched before the forward has ended, not after it.
        """
        final, cuda = self.storage.clone(), self.storage.is_cuda
        self.storage.zero_()
        send = self.sender.follow()
        send.add([RoomPages(room, src, 0)])
        for layer in range(len(self.endpoint.layout.planes) // 2):
            if cuda:
                torch.cuda._sleep(20_000_000)  # 10 ms: without a wait, the copy would send zeros
            for plane in self.endpoint.layout.planes[2 * layer : 2 * layer + 2]:
                span = slice(plane.offset, plane.offset + plane.nbytes)
                self.storage[span] = final[span]
            if layer < told:
                send.stored(layer)
        if queued:
            send.queue_rest()
        send.close()
        if cuda:
            torch.cuda.current_stream().synchronize()
        self.sender.complete(room, len(src))

    def forward(self, command: dict[str, Any]) -> None:
        """Measure a forward whose pages are sent by layer or after it: seconds, for each list of pages."""
        forward = Forward(self.storage.device, len(self.endpoint.layout.planes) // 2, command["tokens"])
        (peer,) = self.sender.peers.all()
        took, launched, behind = [], [], []
        for src, dst in command["lists"]:
            pages = [PageList(src, dst, 0)]
            began = time.perf_counter()
            assert isinstance(self.endpoint, LayerEndpoint)
            write = self.endpoint.write_layers(peer.memory, peer.plan, pages, self.limits.verify_checksums)
            forward.run((lambda layer: None) if command["by"] == "chunk" else _sends(write))
            (tickets,) = write.close()
            launched.append(time.perf_counter() - began)
            forward.wait()
            ended = time.perf_counter()
            tickets = [*tickets, write.rest(0).ticket]
            while any(self.endpoint.poll(ticket) is WriteState.PENDING for ticket in tickets):
                time.sleep(0)
            assert all(self.endpoint.poll(ticket) is WriteState.DONE for ticket in tickets)
            took.append(ended - began)
            behind.append(time.perf_counter() - ended)
        self._reply({"forward": took, "launch": launched, "behind": behind})

    def burst(self, command: dict[str, Any]) -> None:
        """Measure raw writes: one at a time ("single") and then back to back ("many"), in seconds."""
        (peer,) = self.sender.peers.all()
        lists, sums = command["lists"], command["checksums"]
        single, host = [], []
        for src, dst in lists:
            began = time.perf_counter()
            write = self.endpoint.write_pages(peer.memory, peer.plan, PageList(src, dst, 0), sums)
            host.append(time.perf_counter() - began)
            while self.endpoint.poll(write.ticket) is WriteState.PENDING:
                time.sleep(0)  # lets the thread of the tcp transport run
            single.append(time.perf_counter() - began)
        began, tickets = time.perf_counter(), []
        for src, dst in lists:
            write = self.endpoint.write_pages(peer.memory, peer.plan, PageList(src, dst, 0), sums)
            tickets.append(write.ticket)
        done = [self.endpoint.poll(ticket) for ticket in tickets]
        while WriteState.PENDING in done:
            time.sleep(0)
            done = [self.endpoint.poll(ticket) for ticket in tickets]
        self._reply({"single": single, "host": host, "many": time.perf_counter() - began})

    def blocks(self, command: dict[str, Any]) -> None:
        assert isinstance(self.endpoint, CudaIpcSender)
        self.endpoint.writer.local_blocks = self.endpoint.writer.remote_blocks = command["blocks"]
        self._reply({})

    def flood(self, command: dict[str, Any]) -> None:
        """Post writes until killed, far more than the GPU can execute at once."""
        (peer,) = self.sender.peers.all()
        parent = os.getppid()
        self._reply({"flooding": True})
        while os.getppid() == parent:
            self.endpoint.write_pages(
                peer.memory, peer.plan, PageList(command["src"], command["dst"], 0), False
            )

    def _reply(self, reply: dict[str, Any]) -> None:
        self.commands.send(json.dumps(reply).encode())


def receive(config: dict[str, Any]) -> None:
    """Provide a decode node's memory, into which the parent writes."""
    torch.cuda.set_device(config["device"])
    layout = build_layout(config, config["dst_pages"], "dst")
    endpoint = CudaIpcReceiver(config["receiver"], torch.cuda.current_device())
    endpoint.allocate(Region.KV, layout.total_bytes)
    endpoint.allocate(Region.RECORDS, 4096)
    endpoint.open(layout, 1024)
    side = pair_plan(layout, layout).dst
    print(msgspec.json.encode(endpoint.describe("p")).decode(), flush=True)
    for line in sys.stdin:
        print(json.dumps(endpoint.page_digests(side, json.loads(line))), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given["role"] == "receive":
        receive(given)
    else:
        SenderChild(given).run()
        # Nothing is left to do, and to end the interpreter takes half a second where torch is loaded.
        os._exit(0)
