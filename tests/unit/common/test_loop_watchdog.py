"""Which main loops count as hung for too long, and how their process ends."""

from __future__ import annotations

import subprocess
import sys

from common.config.schema import Health
from common.observability.loop_watchdog import EXIT_HUNG, HELD_FACTOR, LOOK_SECONDS, HangMeter
from tests.fakes.waiting import PATIENCE

HUNG = """
import sys, time
from common.observability import loop_watchdog
from common.observability.logs import Log
loop_watchdog.HELD_FACTOR = {held_factor}
def this_function_hangs():
    with loop_watchdog.loop_watchdog(lambda: 1e6, 0.3, Log("node")):
        {body}
this_function_hangs()
"""
# So late that the thread comes first, even where the process does not run for some seconds.
NEVER = 1000


def run(body: str, held_factor: int) -> subprocess.CompletedProcess[str]:
    program = HUNG.format(body=body, held_factor=held_factor)
    return subprocess.run(
        [sys.executable, "-c", program], timeout=PATIENCE, capture_output=True, text=True, check=False
    )


def test_a_hang_is_counted_until_the_loop_turns() -> None:
    meter = HangMeter(10.0, 0.0)
    for look in range(1, 39):
        assert not meter.exceeded(look * LOOK_SECONDS, look * LOOK_SECONDS)
    assert not meter.exceeded(9.75, -3.0), "the loop turned, and announced three seconds"
    for look in range(1, 40):
        assert not meter.exceeded(9.75 + look * LOOK_SECONDS, look * LOOK_SECONDS)
    assert meter.exceeded(19.75, 10.0)


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    meter = HangMeter(10.0, 0.0)
    assert not meter.exceeded(0.25, 0.1)
    assert not meter.exceeded(100.0, 99.9), "after SIGCONT the loop gets a chance to continue"
    assert meter.seconds <= 3 * LOOK_SECONDS


def test_the_process_ends_with_the_stack_of_its_main_thread() -> None:
    result = run("time.sleep(3600)", NEVER)
    assert result.returncode == EXIT_HUNG
    assert "in this_function_hangs" in result.stderr
    assert "the main loop hangs" in result.stderr


def test_so_does_one_whose_native_code_holds_the_interpreter() -> None:
    result = run("import re; re.match('(a+)+$', 'a' * 60 + 'b')", HELD_FACTOR)
    assert result.returncode == 1
    assert "in this_function_hangs" in result.stderr


def test_zero_turns_it_off() -> None:
    assert Health(hang_timeout=0).hung_limit == 0
    assert Health(loop_timeout=3.0, hang_timeout=30.0).hung_limit == 33.0
