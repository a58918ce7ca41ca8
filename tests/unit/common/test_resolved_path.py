"""Paths of a cluster file that are a loop of symbolic links: every reader says so as of any file it cannot read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.config import load_cluster
from common.config.admin_listener import admin_listeners
from common.config.run_directory import run_directory
from common.errors import ConfigError
from common.resolved_path import resolved_path

LOOP = os.strerror(errno.ELOOP)


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """A link to itself, next to a cluster file."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "cluster.yaml").write_text("model: {path: m}\n")
    return tmp_path / "loop"


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert resolved_path(tmp_path / "link" / ".." / "link" / "file") == tmp_path / "real" / "file"


def test_a_loop_is_left_to_who_opens_it(loop: Path) -> None:
    resolved = load_cluster(loop.with_name("cluster.yaml"), ["security.api_keys=loop"], {})
    assert resolved.api_keys_path == loop
    with pytest.raises(OSError, match=LOOP):
        loop.read_bytes()


def test_a_cluster_file_that_is_a_loop_cannot_be_read(loop: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read {loop}: {LOOP}"):
        load_cluster(loop, (), {})


def test_the_model_is_in_no_root_that_is_a_loop(loop: Path) -> None:
    with pytest.raises(ConfigError, match="is in none of model.allowed_roots") as caught:
        load_cluster(loop.with_name("cluster.yaml"), ["model.allowed_roots=[loop]"], {})
    assert caught.value.path == "model.path"


def test_a_run_directory_in_a_loop_cannot_be_made(loop: Path) -> None:
    resolved = load_cluster(loop.with_name("cluster.yaml"), ["process.run_dir=loop/run"], {})
    with pytest.raises(ConfigError, match=f"cannot make .*: {LOOP}") as caught:
        run_directory(resolved)
    assert caught.value.path == "process.run_dir"


def test_an_admin_socket_in_a_loop_is_left_to_who_listens_there(loop: Path) -> None:
    resolved = load_cluster(loop.with_name("cluster.yaml"), ["router.admin=unix:loop/admin"], {})
    assert admin_listeners(resolved).socket == loop / "admin"
