"""Counts the cores that the processes of this machine may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
UNIFIED = "0::/"  # how the line of version 2 begins


def usable_cores(own: Path = OWN_GROUP, groups: Path = GROUPS) -> int:
    """Return the cores of this process's affinity, or fewer if a control group (version 2) limits its CPU time.

    Containers with a CPU limit have such a group: their threads run on all cores of the host, and are halted together
    once they have used up the time of a period.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return cores
    quotas = [math.inf]
    for line in lines:
        if line.startswith(UNIFIED):
            group = Path(line.removeprefix(UNIFIED))
            quotas += (_quota(groups / each / "cpu.max") for each in (group, *group.parents))
    return max(int(min(cores, *quotas)), 1)


def _quota(file: Path) -> float:
    """Return the cores that a group may use; infinity without a limit."""
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is not a number; the root group has no file
        return math.inf
