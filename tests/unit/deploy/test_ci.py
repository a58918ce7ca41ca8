"""What CI runs before the tests, on a machine whose commands only record their arguments."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE

RUN = Path(__file__).parents[3] / ".ci" / "run"


def _command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(folder: Path, apt_exit: int = 0, **named: str) -> tuple[int, set[str]]:
    """Run it as root without a browser; return its exit code and which commands it called."""
    called, bin_folder = folder / "called", folder / "bin"
    note = f'echo "$(basename "$0")" >> "{called}"'
    for each in ("setup", "check"):
        _command(folder / "deploy" / each, note)
    _command(bin_folder / "apt-get", f"{note}; exit {apt_exit}")
    _command(bin_folder / "id", "echo 0")
    for name in ("bash", "basename", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (bin_folder / name).symlink_to(found)
    script = folder / ".ci" / "run"
    script.parent.mkdir()
    shutil.copy2(RUN, script)
    done = subprocess.run([script], env={"PATH": str(bin_folder), **named}, timeout=PATIENCE, check=False)
    return done.returncode, set(called.read_text().split())


def test_the_browser_and_the_environment_are_installed_before_the_tests(tmp_path: Path) -> None:
    assert run(tmp_path) == (0, {"apt-get", "setup", "check"})


def test_nothing_is_set_up_for_an_interpreter_that_has_all_packages(tmp_path: Path) -> None:
    assert run(tmp_path, TANDEM_PYTHON="/usr/bin/python3") == (0, {"apt-get", "check"})


@pytest.mark.parametrize("code", [1, 100])
def test_without_the_browser_no_test_runs(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, apt_exit=code) == (code, {"apt-get", "setup"})
