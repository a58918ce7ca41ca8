"""Directories in /tmp whose old files are kept while a cluster needs them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cleaned_directories import exempt_from_cleaning
from common.launch_record import launch_record
from tests.fakes.descriptors import open_descriptors
from tests.fakes.locks import is_locked

CLEANER = shutil.which("systemd-tmpfiles")
LONG_AGO = 1_000_000_000.0


@pytest.fixture
def cleaned() -> Iterator[Path]:
    """A directory of old files, which a cleaner is told to remove."""
    with tempfile.TemporaryDirectory(prefix="td") as text:
        yield Path(text)


def old_file(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    file = directory / "my.yaml"
    file.touch()
    os.utime(file, (LONG_AGO, LONG_AGO))
    return file


@pytest.mark.skipif(CLEANER is None, reason="needs systemd-tmpfiles")
def test_the_cleaner_of_systemd_leaves_a_kept_directory_alone(cleaned: Path, tmp_path: Path) -> None:
    assert CLEANER is not None
    rules = tmp_path / "tmpfiles.conf"
    rules.write_text(f"e {cleaned} - - - m:1d\n")
    kept, other = old_file(cleaned / "kept"), old_file(cleaned / "other")
    with exempt_from_cleaning(kept.parent):
        subprocess.run([CLEANER, "--clean", str(rules)], check=True)
        assert (kept.exists(), other.exists()) == (True, False)
    subprocess.run([CLEANER, "--clean", str(rules)], check=True)
    assert not kept.exists()


def test_several_may_keep_a_directory_and_none_has_to(tmp_path: Path) -> None:
    before = open_descriptors()
    with exempt_from_cleaning(tmp_path, tmp_path / "missing"):
        with exempt_from_cleaning(tmp_path):
            assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert open_descriptors() == before


def test_a_cleaner_at_work_delays_nothing(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with exempt_from_cleaning(tmp_path):
        assert is_locked(tmp_path)
    os.close(descriptor)


def test_a_process_without_a_supervisor_keeps_its_run_directory(tmp_path: Path) -> None:
    with launch_record(tmp_path, "decode-0", 7.0):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
