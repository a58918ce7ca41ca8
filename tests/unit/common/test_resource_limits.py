"""Limits of confined processes hold, also under lower ones that the user has set."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOWERED = """
import resource
from common.resource_limits import lower_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (40, {hard}))
lower_limit(resource.RLIMIT_NOFILE, {most})
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("hard", "most", "limit"), [(60, 50, 50), (48, 64, 48)])
def test_the_lower_of_two_limits_holds(hard: int, most: int, limit: int) -> None:
    program = LOWERED.format(hard=hard, most=most)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == (repr((limit, limit)), "")


def test_a_resource_without_a_limit_gets_one() -> None:
    program = (
        "import resource\n"
        "from common.resource_limits import lower_limit\n"
        "assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY\n"
        "lower_limit(resource.RLIMIT_AS, 1 << 40)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == (repr((1 << 40, 1 << 40)), "")
