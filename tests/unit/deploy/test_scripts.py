"""The scripts of deploy/: which interpreter runs them, and that nothing is installed where one was named."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE

DEPLOY = Path(__file__).parents[3] / "deploy"
SCRIPTS = sorted(
    path.name
    for path in DEPLOY.iterdir()
    if path.is_file() and not path.suffix and path.name not in ("setup", "lock") and os.access(path, os.X_OK)
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree of the scripts alone: `setup` says that it ran, interpreters say which one they are."""
    deploy = tmp_path / "check out" / "deploy"
    deploy.mkdir(parents=True)
    for name in (*SCRIPTS, "env.sh"):
        shutil.copy2(DEPLOY / name, deploy / name)
    _script(deploy / "setup", "echo installed")
    _script(deploy.parent / ".venv" / "bin" / "python", "echo own $2")
    _script(tmp_path / "named", "echo named $2")
    return deploy


def test_every_script_is_seen() -> None:
    assert {"up", "down", "status", "eval", "check", "config", "keygen", "launch_router"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_named_interpreter_runs_it_and_nothing_is_installed(checkout: Path, script: str) -> None:
    said = _run(checkout / script, TANDEM_PYTHON=str(checkout.parents[1] / "named"))
    assert said
    assert all(line.startswith("named ") for line in said), said


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_one_its_own_environment_is_set_up_first(checkout: Path, script: str) -> None:
    said = _run(checkout / script)
    assert said[0] == "installed"
    assert said[1:]
    assert all(line.startswith("own ") for line in said[1:]), said


@pytest.mark.parametrize("there", [True, False])
def test_an_environment_of_another_checkout_is_left_alone(tmp_path: Path, there: bool) -> None:
    """Of a worktree whose .venv is a link: an editable install would turn the other checkout's imports over to it.

    Where that checkout is gone, moved with its environment for example, it is set up as ever.
    """
    deploy = tmp_path / "worktree" / "deploy"
    deploy.mkdir(parents=True)
    shutil.copy2(DEPLOY / "setup", deploy / "setup")
    for name in ("pyproject.toml", "requirements.lock"):
        (deploy.parent / name).touch()
    environment = tmp_path / "environment"
    _script(environment / "bin" / "python", f'echo "$@" >> "{tmp_path}/ran"')
    packages = environment / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    other = tmp_path / "other"
    (packages / "_editable_impl_tandem.pth").write_text(f"{other}\n{other}")
    (deploy.parent / ".venv").symlink_to(environment)
    if there:
        other.mkdir()
    ran = subprocess.run([deploy / "setup"], capture_output=True, text=True, check=False, timeout=20)
    assert ran.returncode == (2 if there else 0)
    assert (tmp_path / "ran").exists() is not there
    assert (environment / ".tandem").exists() is not there
    assert (f"TANDEM_PYTHON={other}/.venv/bin/python" in ran.stderr) is there


def _script(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{line}\n")
    path.chmod(0o755)


def _run(script: Path, **named: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    ran = subprocess.run(
        [script, "http://127.0.0.1:1"],
        env={**environment, **named},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return ran.stdout.splitlines()
