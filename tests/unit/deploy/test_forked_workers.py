"""Processes of pytest-xdist that are forks run, skip and report the same tests as started ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = {
    "test_shared.py": """
import atexit, os, pathlib
import pytest
IMPORTED_BY = os.getpid()
@pytest.mark.parametrize("number", range(2))
def test_a_fork(number):
    atexit.register(pathlib.Path("ended").touch)
    assert IMPORTED_BY != os.getpid()
    assert os.environ["GIVEN"] == "to the controller"
""",
    "test_skipped.py": "import pytest; pytest.importorskip('no_such_module'); import os; os.abort()",
    "test_broken.py": "import os, missing_module",
    "test_failing.py": "def test_failing(): assert [1] == [2]",
}


def test_forks_run_the_tests_and_report_what_is_wrong(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    options = ("-p", "no:cacheprovider", "--import-mode=importlib", "--continue-on-collection-errors", "-ra")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.fakes.forked_workers", "-n", "2", *options, "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GIVEN": "to the controller"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith("===")
    assert "1 failed, 2 passed, 1 skipped, 1 error" in done.stdout
    assert "assert [1] == [2]" in done.stdout
    assert "could not import 'no_such_module'" in done.stdout
    assert "No module named 'missing_module'" in done.stdout
    assert (tmp_path / "ended").exists()
