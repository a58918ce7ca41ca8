"""A prefill node without a model, in a process of its own: it answers each grant with a record after a random time.

`python -m tests.bench.scripted_prefill JSON`, where JSON is a `Script`. Pages are not written.
"""

from __future__ import annotations

import heapq
import mmap
import random
import sys
import time
from pathlib import Path

import msgspec
import zmq

from common.ipc import RouterSocket
from kv_transfer import handoff_record, messages
from kv_transfer.handoff_record import HandoffRecord, HiddenDtype
from kv_transfer.record_times import sending_time
from kv_transfer.transport.one_host import process


class Script(msgspec.Struct, frozen=True):
    """What the process does."""

    address: str
    incarnation: str
    records: str  # file with the decode node's record slots
    slot_bytes: int
    tokens: int  # tokens per prompt
    first_token: int
    topk: int  # top-k of the draft state
    hidden: bytes
    hidden_dtype: HiddenDtype
    seconds: tuple[float, float]  # least and most from a grant to its record


def run(script: Script) -> None:
    """Serve until killed."""
    with Path(script.records).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    socket = RouterSocket(zmq.Context(), script.address)
    record = HandoffRecord(
        first_token=script.first_token,
        num_tokens=script.tokens,
        draft_topk_probs=(1.0,) * script.topk,
        draft_topk_ids=(script.first_token,) * script.topk,
        draft_hidden=script.hidden,
        draft_hidden_dtype=script.hidden_dtype,
    )
    draw, due = random.Random(1), list[tuple[float, int, bytes, messages.Slots]]()
    while True:
        for peer, frame in socket.drain():
            _, message = messages.decode_for_sender(frame)
            if isinstance(message, messages.Hello):
                welcome = messages.Welcome("scripted", process.current())
                socket.post(peer, messages.encode(welcome, script.incarnation))
            elif isinstance(message, messages.Slots):
                at = time.monotonic() + draw.uniform(*script.seconds)
                heapq.heappush(due, (at, message.generation, peer, message))
        while due and due[0][0] <= time.monotonic():
            _, _, peer, slots = heapq.heappop(due)
            data = handoff_record.encode(record, slots.room, slots.generation, script.slot_bytes)
            begin = slots.record_slot * script.slot_bytes
            memory[begin : begin + len(data)] = data
            written = messages.RecordWritten(slots.room, slots.generation, len(data), sending_time())
            socket.post(peer, messages.encode(written, script.incarnation))
        time.sleep(0.0001)


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Script))
