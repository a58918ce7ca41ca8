"""Samples of the event loop's stack."""

from __future__ import annotations

import gzip
import threading
from pathlib import Path

from common.observability.profile_files import KEPT_FILES
from router.process.stack_samples import write_profile


def test_the_stacks_of_a_thread_are_counted_in_a_bounded_number_of_files(tmp_path: Path) -> None:
    stop = threading.Event()

    def busy_function() -> None:
        stop.wait()

    thread = threading.Thread(target=busy_function)
    thread.start()
    try:
        made = [
            write_profile("router", tmp_path, 0.02, threading.Event(), thread.ident)
            for _ in range(KEPT_FILES + 1)
        ]
    finally:
        stop.set()
        thread.join()
    assert sorted(tmp_path.iterdir()) == sorted(path for path, _ in made[1:])
    path, samples = made[-1]
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == samples > 0
    assert all("busy_function;threading.Event.wait" in line for line in lines)
    assert lines[0].startswith("threading.Thread._bootstrap;")
