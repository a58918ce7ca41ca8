"""Text workers without processes."""

from __future__ import annotations

import msgspec

from router.text.jobs import Job, JobAnswer, JobResult, Payload
from router.text.work import TextWork


class InProcess:
    """Runs each job at once in this process and records it. Heads are encoded as msgpack, as in real workers."""

    def __init__(self, work: TextWork) -> None:
        self._work = work
        self.jobs: list[tuple[Job, int]] = []  # (job, bytes of its payload)

    async def run(self, job: Job, payload: Payload) -> JobAnswer:
        self.jobs.append((job, len(payload)))
        answer, result = self._work.do(msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job), payload)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=JobResult), result
