"""A worker process for texts: limited in memory and time, killed when it exceeds them, one job at a time.

    python -m router.text.process      its standard input is a socket to the router; it runs until that closes

A frame is two 4-byte little-endian lengths, then a head (msgpack) and a payload. The router sends `WorkerSettings`
first, which the worker answers with an empty `JobResult` once it is ready, and then jobs, each answered before the
next.
"""

from __future__ import annotations

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
from router.process.child_process import confine, frame_head
from router.process.freed_memory import find_trim
from router.text.jobs import Job, JobAnswer, JobResult, Payload, WorkerSettings, refusal, too_costly
from router.text.work import TextWork

ADDRESS_SPACE = 2 << 30  # bytes
OPEN_FILES = 64
LARGE_JOB = 1 << 20  # bytes of a payload after which freed memory goes back to the system
MAX_DEFECT = 8192  # characters of a traceback
_settings = msgspec.msgpack.Decoder(WorkerSettings)
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process (SIGPROF) after `seconds` more of CPU time; 0 removes the limit.

    The limit is CPU time, not wall time, because a busy machine must not refuse requests. The signal is not handled:
    Python would handle it only between two bytecodes, and a single operation can take for ever.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(channel: socket.socket) -> None:
    """Answer jobs until the router closes its end."""
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
        _send(channel, JobResult(error="model", message=str(error)), b"")
        return
    trim = find_trim()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)  # a large body has millions of objects, none in a cycle
    _send(channel, JobResult(), b"")
    while True:
        try:
            head, payload = _receive(channel)
        except EOFError:
            return
        job = _jobs.decode(head)
        answer, result = _do(work, job, payload)
        limit_cpu(0)
        if len(result) > settings.max_answer_bytes:
            message = f"the answer would have {len(result)} bytes; the limit is {settings.max_answer_bytes}"
            answer, result = refusal(InvalidRequest(message, param=too_costly(job)[1])), b""
        _send(channel, answer, result)
        if len(payload) >= LARGE_JOB:
            del payload, result
            trim()


def _do(work: TextWork, job: Job, payload: Payload) -> JobAnswer:
    try:
        return work.do(job, payload)
    except Exception:  # a bug of ours: other requests must not wait for a new process
        return JobResult(defect=traceback.format_exc()[-MAX_DEFECT:]), b""


def _receive(channel: socket.socket) -> tuple[bytearray, bytearray]:
    """Return (head, payload). Raises EOFError."""
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


def _send(channel: socket.socket, head: JobResult, payload: Payload) -> None:
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
    except OSError:  # the router has ended
        sys.exit(1)


if __name__ == "__main__":
    main()
