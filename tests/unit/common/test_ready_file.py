"""Probes see by a file whether a node takes requests."""

from __future__ import annotations

from pathlib import Path

from common.ready_file import ReadyFile, ready_file, ready_path


def test_the_file_exists_while_the_node_takes_requests(tmp_path: Path) -> None:
    path = ready_path(tmp_path, "decode-0")
    path.touch()
    with ready_file(tmp_path, "decode-0") as ready:
        assert not path.exists(), "the file of a killed process says nothing about its successor"
        ready.set()
        assert path.stat().st_mode & 0o777 == 0o600
        ready.clear()
        assert not path.exists()
        ready.set()
    assert list(tmp_path.iterdir()) == []


def test_a_node_serves_without_a_place_for_the_file(tmp_path: Path) -> None:
    for where in (None, tmp_path / "missing"):
        ready = ReadyFile(where, "decode-0")
        ready.set()
        ready.clear()
