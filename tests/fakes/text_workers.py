"""Text workers without processes."""

from __future__ import annotations

import msgspec

from router.text_jobs import Answer, Job
from router.text_work import Payload, TextWork


class InProcess:
    """Does each job at once, in the caller's process; keeps the jobs. Heads cross msgpack, as they do for real."""

    def __init__(self, work: TextWork) -> None:
        self._work = work
        self.jobs: list[tuple[Job, int]] = []  # with the bytes of the payload

    async def run(self, job: Job, payload: Payload) -> tuple[Answer, Payload]:
        self.jobs.append((job, len(payload)))
        answer, result = self._work.do(msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job), payload)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=Answer), result
