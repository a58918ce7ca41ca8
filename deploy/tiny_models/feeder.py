"""Worker processes that produce training batches, and the queue that delivers them."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue

from tokenizers import Tokenizer

from deploy.tiny_models.corpus import Source, Windows

QUEUED_BATCHES = 64
FIRST_BATCH_SECONDS = 60.0


def _work(kind: type[Source], tokenizer_json: str, seed: int, batch_tokens: int, out: Queue[Windows]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process: there are several processes
    source = kind(Tokenizer.from_str(tokenizer_json), seed)
    for batch in source.batches(batch_tokens):
        out.put(batch)


@contextmanager
def feed(
    tokenizer: Tokenizer,
    seed: int,
    batch_tokens: int,
    workers: int,
    source: type[Source],
) -> Iterator[Iterator[Windows | None]]:
    """Yield batches from `workers` processes, which end with the context; None when no batch is waiting.

    Workers are spawned, not forked, because the parent has torch's threads. A worker imports neither torch nor
    transformers.
    """
    context = multiprocessing.get_context("spawn")
    batches: Queue[Windows] = context.Queue(QUEUED_BATCHES)
    processes = [
        context.Process(
            target=_work,
            args=(source, tokenizer.to_str(), seed * 1000 + index, batch_tokens, batches),
            daemon=True,
        )
        for index in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        yield _arriving(batches, processes)
    finally:
        for process in processes:
            process.kill()  # loses nothing; on SIGTERM a worker could wait for ever on a full queue
        for process in processes:
            process.join(10)
        batches.cancel_join_thread()
        batches.close()


def _arriving(batches: Queue[Windows], processes: Sequence[BaseProcess]) -> Iterator[Windows | None]:
    deadline = time.monotonic() + FIRST_BATCH_SECONDS
    first = None
    while first is None:
        first = _next(batches, processes, wait=0.2)
        if time.monotonic() > deadline:
            raise RuntimeError(f"no training batch after {FIRST_BATCH_SECONDS:.0f} s: are all cores busy?")
    yield first
    while True:
        yield _next(batches, processes, wait=0.0)


def _next(batches: Queue[Windows], processes: Sequence[BaseProcess], wait: float) -> Windows | None:
    try:
        return batches.get(timeout=wait) if wait else batches.get_nowait()
    except queue.Empty:
        if any(process.is_alive() for process in processes):
            return None
    # Raised, because the trainer would otherwise continue unnoticed with replayed data.
    raise RuntimeError("every data worker has died: see their errors above")
