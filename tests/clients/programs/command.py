"""Runs the commands of a client, each with a deadline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.clients.environments import with_programs

DIRECTORY = Path(os.environ.get("CLIENTS_DIRECTORY", "."))
MODEL_PATH = os.environ.get("CLIENTS_MODEL_PATH", "")
BIN = DIRECTORY / "bin"
# Fields of a chat for clients that time the content of an answer and do not know `reasoning_content`.
ANSWER_AT_ONCE = json.dumps({"chat_template_kwargs": {"enable_thinking": False}})


def run(
    program: str, *arguments: str, seconds: float = 280, without: str = "", home: Path | None = None
) -> str:
    """Return the output of a program of the client's environment. Raises AssertionError with its end if it fails.

    Args:
        without: a variable of the environment that it does not get.
        home: the directory where it reads and writes its settings; default: the user's own.
    """
    environment = {**with_programs(DIRECTORY), "PWD": str(DIRECTORY)}
    environment.pop(without, None)
    if home is not None:
        environment["HOME"] = str(home)
    found = shutil.which(program, path=environment["PATH"])
    assert found is not None, f"{program} is not installed"
    ended = subprocess.run(
        [found, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        cwd=DIRECTORY,
        env=environment,
    )
    print(ended.stdout)
    assert ended.returncode == 0, f"exit {ended.returncode}: {ended.stdout[-400:]}"
    return ended.stdout
