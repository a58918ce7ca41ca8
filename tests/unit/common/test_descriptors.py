"""A process can open as many files as it is allowed to, without a pause for a larger table of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import ENV, MODEL

PROGRAM = """
import os, resource, sys
from pathlib import Path
{imports}

def places():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["FDSize"])

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
before, opened = places(), len(os.listdir("/proc/self/fd"))
{call}
print(before, places(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd")) - opened)
"""
PREPARE = PROGRAM.format(
    imports="from common.descriptors import prepare_descriptors", call="prepare_descriptors()"
)
# The load generator, which only shows its options: with many connections it must not pause either.
BENCH = PROGRAM.format(
    imports="import contextlib, io\nfrom deploy.bench_cli import main",
    call="sys.argv[1:] = ['--help']\nwith contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):"
    "\n    main()",
)
# A whole process of a cluster that has nothing to do.
PROCESS = PROGRAM.format(
    imports="from common.process import run_process",
    call='run_process("router", Path(sys.argv[2]), None, None, lambda resolved, reporter, log: None)',
)


def _run(program: str, *arguments: str) -> list[int]:
    """Return the places before and after, the limit afterwards, and how many more descriptors are open."""
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=ENV, capture_output=True, text=True, check=True
    )
    return [int(each) for each in run.stdout.split()]


@pytest.mark.parametrize("hard", [1500, 2048])
def test_the_table_has_room_for_every_descriptor_from_the_start(hard: int) -> None:
    before, after, limit, left_open = _run(PREPARE, str(hard))
    assert before < hard <= after
    assert (limit, left_open) == (hard, 0)


def test_every_process_of_a_cluster_prepares_its_descriptors(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f'model: {{path: "{MODEL}"}}\nprocess: {{run_dir: "{tmp_path}/r"}}\n')
    _, after, limit, _ = _run(PROCESS, "1024", str(file))
    assert limit == 1024 <= after


def test_the_load_generator_prepares_its_descriptors() -> None:
    _, after, limit, _ = _run(BENCH, "1024")
    assert limit == 1024 <= after
