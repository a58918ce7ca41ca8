"""The disk of a run can be filled and freed, and its logs are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import disk
from tests.chaos.disk import Disk


def test_it_fills_frees_and_keeps_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MIB", 1)
    made = Disk(wanted=True)
    made.mount()
    try:
        if not made.can_be_filled:
            pytest.skip("a tmpfs cannot be mounted here")
        log = made.logs / "router.log"
        log.write_text("before\n")
        made.fill()
        with pytest.raises(OSError, match="No space left"):
            (made.logs / "new.log").write_bytes(bytes(8192))
        made.free()
        with log.open("a") as file:
            file.write("after\n")
    finally:
        made.remove(tmp_path)
    assert (tmp_path / "router.log").read_text() == "before\nafter\n"
    assert not made.path.exists()


def test_without_a_mount_it_is_a_directory(tmp_path: Path) -> None:
    made = Disk(wanted=False)
    made.mount()
    (made.logs / "router.log").write_text("said\n")
    made.remove(tmp_path)
    assert not made.can_be_filled
    assert (tmp_path / "router.log").read_text() == "said\n"
    assert not made.path.exists()
