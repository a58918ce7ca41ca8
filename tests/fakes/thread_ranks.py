"""Ranks as threads of one process, with the groups and layers of a node."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.engine.collectives.endpoints import SLOT_BYTES, open_endpoints
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.collectives.shared_memory_group import SharedMemoryGroup
from common.errors import RankFailed
from tests.fakes.waiting import PATIENCE

Result = TypeVar("Result")


def thread_groups(
    size: int, timeout: float = PATIENCE, slot_bytes: int = SLOT_BYTES
) -> list[SharedMemoryGroup]:
    """Return the ends of one group, each for a thread of this process."""
    return [SharedMemoryGroup(endpoint, timeout) for endpoint in open_endpoints(size, slot_bytes)]


def run_groups(
    groups: list[SharedMemoryGroup], run: Callable[[SharedMemoryGroup], Result]
) -> list[Result | Exception]:
    """Run a function on every rank at once and return what each returned or raised. A rank that ends leaves."""

    def guarded(group: SharedMemoryGroup) -> Result | Exception:
        try:
            return run(group)
        except Exception as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(guarded, groups))


def run_ranks(size: int, run: Callable[[GroupRanks], Result]) -> list[Result]:
    """Run a function on every rank at once and return the results in their order. Raises what the first one raised."""
    results = run_groups(thread_groups(size), lambda group: run(GroupRanks(group)))
    failures = [each for each in results if isinstance(each, Exception)]
    for failure in sorted(failures, key=lambda each: isinstance(each, RankFailed)):
        raise failure
    return [each for each in results if not isinstance(each, Exception)]
