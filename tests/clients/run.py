"""Installs and runs one client after another, and collects what each feature did."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from tests.clients import target
from tests.clients.catalog import Client
from tests.clients.environments import InstallError, install, version
from tests.cluster.harness import ENV, ROOT

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one feature of one client."""

    client: str
    version: str
    feature: str
    passed: bool
    why: str = ""


def run(client: Client, url: str, model: Path, keep: Path) -> list[Result]:
    """Install a client below `keep` and run its script against `url`. `model`: the directory that is served."""
    slug = re.sub(r"[^a-z0-9]+", "-", client.name.lower()).strip("-")
    directory = keep / slug
    try:
        install(client.environment, directory)
    except InstallError as error:
        return [Result(client.name, "", "install", False, str(error))]
    installed = version(client.environment, directory)
    report = directory / "report.jsonl"
    report.unlink(missing_ok=True)
    problem = target.problem()
    environment = {
        **ENV,
        "CLIENTS_URL": url,
        "CLIENTS_MODEL": target.NAME,
        "CLIENTS_MODEL_PATH": str(model),
        "CLIENTS_QUESTION": problem.question,
        "CLIENTS_VALUE": str(problem.value),
        "CLIENTS_REPORT": str(report),
        "CLIENTS_DIRECTORY": str(directory),
    }
    with (directory / "output.log").open("w") as log:
        ended = _finish(_command(client, directory), environment, log, client.seconds)
    lines = report.read_text().splitlines() if report.exists() else []
    results = [Result(client.name, installed, **json.loads(line)) for line in lines]
    if ended != 0:
        why = f"{ended}: {(directory / 'output.log').read_text()[-600:]}"
        results.append(Result(client.name, installed, "script", False, why))
    return results


def _command(client: Client, directory: Path) -> list[str]:
    kind = client.script.partition("/")[0]
    if kind == "javascript":
        for file in (HERE / "javascript").glob("*.mjs"):
            shutil.copy(file, directory)
        return [str(directory / "bin" / "node"), str(directory / Path(client.script).name)]
    module = f"tests.clients.{client.script.removesuffix('.py').replace('/', '.')}"
    python = str(directory / "bin" / "python") if kind == "python" else sys.executable
    return [python, "-m", module]


def _finish(command: list[str], environment: dict[str, str], log: TextIO, seconds: float) -> int | str:
    """Return the exit status, or that the deadline ended it; nothing that it started is left."""
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return started.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def current_commit() -> str:
    """Return the commit of this tree, with `-dirty` if files differ from it."""
    commit = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(commit, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def save(results: Sequence[Result], file: Path, commit: str) -> None:
    """Write the results of one run as JSON. `commit`: that of the tree when the run began."""
    clients: dict[str, dict[str, Any]] = {}
    for each in results:
        client = clients.setdefault(each.client, {"version": each.version, "features": {}})
        client["features"][each.feature] = True if each.passed else each.why
    summary = {
        "commit": commit,
        "finished": datetime.now(UTC).isoformat(timespec="minutes"),
        "python": platform.python_version(),
        "passed": sum(each.passed for each in results),
        "failed": sum(not each.passed for each in results),
        "clients": clients,
    }
    file.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def table(results: list[Result]) -> str:
    """Return all results as a table in Markdown."""
    rows = ["| client | version | feature | passed | why |", "|---|---|---|---|---|"]
    for each in results:
        why = " ".join(each.why.split())[:300].replace("|", "\\|")
        rows.append(
            f"| {each.client} | {each.version} | {each.feature} | {'yes' if each.passed else 'NO'} | {why} |"
        )
    return "\n".join(rows)
