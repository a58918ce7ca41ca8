"""A worker process for texts: confined in memory and time, killed when it takes too much, one job at a time.

    python -m router.text_process      the router's socket as standard input, until it closes

A frame is two lengths of 4 bytes, little-endian, then a head (msgpack) and a payload. Settings come first, answered by
an empty Answer once the worker is ready; then jobs, each answered before the next.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from common.checkpoint.model_manifest import check_manifests
from common.errors import InvalidRequest, ModelError
from router.child_process import confine, frame_head
from router.text_jobs import Answer, Job, Settings, refusal, too_costly
from router.text_work import Payload, TextWork

ADDRESS_SPACE = 2 << 30  # bytes
OPEN_FILES = 64
LARGE_JOB = 1 << 20  # bytes of a payload after which freed memory goes back to the system
MAX_DEFECT = 8192  # characters of a traceback
_settings = msgspec.msgpack.Decoder(Settings)
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def limit_cpu(seconds: float) -> None:
    """The kernel ends this process (SIGPROF) once it has computed for so long from now on; 0 lifts the limit.

    CPU time, not wall time: a busy machine must not refuse anybody. By a signal that is not handled, since Python would
    handle it only between two bytecodes, and one operation can take for ever.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(channel: socket.socket) -> None:
    """Answer jobs. Returns when the router closes its end."""
    head, _ = _receive(channel)
    settings = _settings.decode(head)
    os.nice(settings.nice)
    try:
        path = Path(settings.model_path)
        if settings.manifest is not None:
            check_manifests([(path, Path(settings.manifest))], weights=False)
        template = None if settings.chat_template is None else Path(settings.chat_template)
        work = TextWork.load(path, limit_cpu, template)
    except ModelError as error:
        _send(channel, Answer(error="model", message=str(error)), b"")
        return
    trim = _memory_trimmer()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # a large body is millions of objects, none of them in a cycle
    _send(channel, Answer(), b"")
    while True:
        try:
            head, payload = _receive(channel)
        except EOFError:
            return
        job = _jobs.decode(head)
        answer, result = _do(work, job, payload)
        limit_cpu(0)
        if len(result) > settings.max_answer_bytes:
            message = (
                f"the answer would have {len(result)} bytes, at most {settings.max_answer_bytes} are sent"
            )
            answer, result = refusal(InvalidRequest(message, param=too_costly(job)[1])), b""
        _send(channel, answer, result)
        if len(payload) >= LARGE_JOB:
            del payload, result
            trim()


def _do(work: TextWork, job: Job, payload: Payload) -> tuple[Answer, Payload]:
    try:
        return work.do(job, payload)
    except Exception:  # a defect of ours: the other requests do not wait for a new process
        return Answer(defect=traceback.format_exc()[-MAX_DEFECT:]), b""


def _memory_trimmer() -> ctypes._NamedFuncPointer | type[bool]:
    """glibc's malloc_trim; a no-op in other C libraries."""
    return getattr(ctypes.CDLL(None), "malloc_trim", bool)


def _receive(channel: socket.socket) -> tuple[bytearray, bytearray]:
    """(head, payload). Raises EOFError."""
    lengths = _exactly(channel, 8)
    head = _exactly(channel, int.from_bytes(lengths[:4], "little"))
    return head, _exactly(channel, int.from_bytes(lengths[4:], "little"))


def _exactly(channel: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, read = memoryview(data), 0
    while read < count:
        got = channel.recv_into(view[read:])
        if not got:
            raise EOFError
        read += got
    return data


def _send(channel: socket.socket, head: Answer, payload: Payload) -> None:
    start = frame_head(head, len(payload))
    if len(payload) < LARGE_JOB:
        channel.sendall(start + payload)
    else:
        channel.sendall(start)
        channel.sendall(payload)


def main() -> None:
    confine(ADDRESS_SPACE, OPEN_FILES)
    try:
        serve(socket.socket(fileno=0))
    except OSError:  # the router is gone
        sys.exit(1)


if __name__ == "__main__":
    main()
