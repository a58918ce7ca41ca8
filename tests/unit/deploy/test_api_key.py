"""deploy/api_key: a key is printed once, and its file holds what the router needs to verify it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from common import file_lock
from common.config.api_keys import read_api_keys
from deploy.api_key import main

APP = typer.Typer()
APP.command()(main)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(each) for each in arguments])


def test_a_key_is_random_printed_and_stored_as_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    first, second = run("team-a", file), run("team-b", file)
    assert (first.exit_code, second.exit_code) == (0, 0)
    secrets = [result.stdout.strip() for result in (first, second)]
    assert secrets[0] != secrets[1]
    keys = read_api_keys(file)
    assert [key.id for key in keys] == ["team-a", "team-b"]
    assert [key.sha256 for key in keys] == [hashlib.sha256(each.encode()).hexdigest() for each in secrets]
    assert all(secret not in file.read_text() for secret in secrets)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_all_options_are_written_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("# keys of the lab\n")
    file.chmod(0o600)
    options = ["--scope", "admin", "--scope", "inference", "--expires", "2127-01-31", "--concurrency", 3]
    options += ["--requests-per-minute", 60, "--tokens-per-minute", 1000, "--weight", 3, "--priority", -2]
    assert run("ops", file, *options).exit_code == 0
    (key,) = read_api_keys(file)
    assert key.scopes == ("admin", "inference")
    assert key.expires == datetime(2127, 1, 31, tzinfo=UTC)
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrency) == (60, 1000, 3)
    assert (key.weight, key.priority) == (3, -2)
    assert file.read_text().startswith("# keys of the lab\n")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "keys.yaml", tmp_path / "keys.yaml"
    real.parent.mkdir()
    link.symlink_to(real)
    for name in ("a", "b"):
        assert run(name, link).exit_code == 0
    assert link.is_symlink()
    assert [key.id for key in read_api_keys(real)] == ["a", "b"]


def test_a_loop_of_links_is_refused_and_stays(tmp_path: Path) -> None:
    link = tmp_path / "keys.yaml"
    link.symlink_to(link.name)
    result = run("a", link)
    assert result.exit_code == 2
    assert os.strerror(errno.ELOOP) in result.stderr
    assert link.is_symlink()


@pytest.mark.parametrize("before", ["# ours\n  - ", "  -   ", "---\n- "])
def test_a_handwritten_list_keeps_its_form(tmp_path: Path, before: str) -> None:
    file = tmp_path / "keys.yaml"
    space = " " * len(before.rpartition("\n")[2])
    file.write_text(f"{before}id: a\n{space}sha256: '{1:064d}'\n{space}scopes:\n{space}  - admin\n")
    file.chmod(0o600)
    result = run("b", file)
    assert result.exit_code == 0, result.stderr
    assert [key.id for key in read_api_keys(file)] == ["a", "b"]
    assert file.read_text().startswith(before)


@pytest.mark.parametrize("text", ["[]", "[\n]\n"])
def test_a_list_in_brackets_is_extended(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    file.chmod(0o600)
    for name in ("a", "b"):
        assert run(name, file).exit_code == 0
    assert [key.id for key in read_api_keys(file)] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("team-a",), "there is a key with the id team-a; choose another id"),
        (("a b",), "id"),
        (("x", "--expires", "soon"), "--expires: 'soon' is not a date; write "),
        (("x", "--expires", "2127-01-31}, {id: y"), "--expires: "),
        (("x", "--expires", "2127-13-31"), "is not YAML"),
        (
            ("x", "--expires", "2020-01-31"),
            "--expires: 2020-01-31T00:00:00+00:00 has passed, so no request could use this key; give a later time, or "
            "leave out --expires for a key that stays valid",
        ),
        (("x", "--expires", "0001-01-01T00:00:00+02:00"), "--expires"),
        (("x", "--expires", "2020-02-01T01:30:00+02:00"), "--expires: 2020-02-01T01:30:00+02:00 has passed"),
        (("x", "--scope", "root"), "'root'"),
    ],
)
def test_refusals_change_nothing(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    file = tmp_path / "keys.yaml"
    assert run("team-a", file).exit_code == 0
    before = file.read_text()
    result = run(arguments[0], file, *arguments[1:])
    assert result.exit_code == 2
    assert words in result.stderr
    assert f".{file.name}" not in result.stderr, "the file that is being made is nothing to look for"
    assert not result.stdout
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_key_that_has_expired_does_not_prevent_another(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{id: old, sha256: '{1:064d}', expires: 2020-01-31}}\n")
    file.chmod(0o600)
    assert run("new", file, "--expires", "2127-01-31").exit_code == 0
    assert [key.id for key in read_api_keys(file)] == ["old", "new"]


def test_a_file_that_others_can_read_or_that_is_broken_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: 5\n")
    file.chmod(0o600)
    assert run("a", file).exit_code == 2
    file.write_text("[]")
    file.chmod(0o644)
    result = run("a", file)
    assert result.exit_code == 2
    assert "chmod 600" in result.stderr
    assert file.read_text() == "[]"
    file.write_bytes(b"# cl\xe9s\n")
    result = run("a", file)
    assert result.exit_code == 2
    assert "is not text" in result.stderr
    assert file.read_bytes() == b"# cl\xe9s\n"


def test_another_run_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    monkeypatch.setattr(file_lock, "LOCK_SECONDS", 0.0)
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        result = run("a", file)
    finally:
        os.close(descriptor)
    assert result.exit_code == 2
    assert f"another process has held the lock of {tmp_path}" in result.stderr
    assert not file.exists()
