"""Two cluster files with one run directory: no command takes the cluster of one for that of the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from common.process_entry import entry
from deploy import cli, top_cli
from deploy.planning.routers import Routers
from deploy.process_table import Table, write_table

RUNNER = CliRunner()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The file of a running cluster, and another one with the same run directory. No signal is sent."""
    monkeypatch.setenv("TANDEM_PROCESS_RUN_DIR", str(tmp_path / "run"))

    def send(target: int, number: int) -> None:
        raise AssertionError(f"signal {number} was sent")

    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    monkeypatch.setattr(os, "kill", send)
    (tmp_path / "run").mkdir(mode=0o700)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    for file in (first, second):
        file.write_text("model: {path: m}\n")
    table = Table(
        supervisor=entry(os.getpid()),
        cluster=str(first),
        url="http://127.0.0.1:9",
        state="ready",
        processes={},
    )
    write_table(tmp_path / "run", table)
    return first, second


@pytest.mark.parametrize(
    ("command", "code"), [(["down"], 1), (["status"], 3), (["up"], 1), (["up", "--detach"], 1)]
)
def test_the_cluster_of_another_file_is_named_and_left_alone(
    files: tuple[Path, Path], command: list[str], code: int
) -> None:
    first, second = files
    result = RUNNER.invoke(cli.app, [*command, str(second)])
    said = " ".join(result.stderr.split())
    assert result.exit_code == code
    assert f"in use by the cluster of {first} (pid {os.getpid()}), which deploy/down {first} stops" in said


def test_the_cluster_of_another_file_is_not_shown(files: tuple[Path, Path]) -> None:
    first, second = files
    app = typer.Typer()
    app.command()(top_cli.run)
    result = RUNNER.invoke(app, [str(second)])
    assert result.exit_code == 1
    assert f"in use by the cluster of {first} (pid {os.getpid()})" in " ".join(result.stderr.split())


async def test_no_role_is_changed_in_the_cluster_of_another_file(files: tuple[Path, Path]) -> None:
    first, second = files
    routers = Routers(str(second), None)
    for asked in (routers.read(), routers.change_role("decode-0", "prefill", 1.0)):
        with pytest.raises(ConnectionError, match=f"in use by the cluster of {first} "):
            await asked


def test_the_cluster_of_a_file_that_was_renamed_is_found(files: tuple[Path, Path]) -> None:
    first, second = files
    first.rename(second)
    result = RUNNER.invoke(cli.app, ["up", str(second)])
    assert result.exit_code == 1
    assert "this cluster is already running at http://127.0.0.1:9" in " ".join(result.stderr.split())
