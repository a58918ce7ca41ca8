"""Runs the commands of a client, each with a deadline."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

DIRECTORY = Path(os.environ.get("CLIENTS_DIRECTORY", "."))
MODEL_PATH = os.environ.get("CLIENTS_MODEL_PATH", "")
BIN = DIRECTORY / "bin"
# Fields of a chat for clients that time the content of an answer and do not know `reasoning_content`.
ANSWER_AT_ONCE = json.dumps({"chat_template_kwargs": {"enable_thinking": False}})


def run(program: str, *arguments: str, seconds: float = 280, without: str = "") -> str:
    """Return the output of a program of the client's environment. Raises AssertionError with its end if it fails.

    `without`: a variable of the environment that it does not get.
    """
    ended = subprocess.run(
        [str(BIN / program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        cwd=DIRECTORY,
        env={name: value for name, value in os.environ.items() if name != without},
    )
    print(ended.stdout)
    assert ended.returncode == 0, f"exit {ended.returncode}: {ended.stdout[-400:]}"
    return ended.stdout
