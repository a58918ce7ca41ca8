"""A rank that sums over its group without an end: `python -m tests.fakes.summing_rank ENDPOINT SECONDS STOPS`.

After its first sum it stops itself STOPS times, STOP_AFTER seconds after it has begun to wait or was continued.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import msgspec
import torch

from common.engine.collectives.endpoints import GroupEndpoint
from common.engine.collectives.shared_memory_group import SharedMemoryGroup

STOP_AFTER = 0.5


def stop(times: int) -> None:
    for _ in range(times):
        time.sleep(STOP_AFTER)
        os.kill(os.getpid(), signal.SIGSTOP)


def main(endpoint: GroupEndpoint, timeout: float, stops: int) -> None:
    group = SharedMemoryGroup(endpoint, timeout)
    group.all_reduce(torch.arange(100_000.0) * endpoint.rank)
    threading.Thread(target=stop, args=(stops,), daemon=True).start()
    while True:
        group.all_reduce(torch.arange(100_000.0) * endpoint.rank)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=GroupEndpoint), float(sys.argv[2]), int(sys.argv[3]))
