"""deploy/up refuses a cluster file whose model or draft model does not exist before it starts any process."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config.load import load_cluster
from common.config.run_directory import run_directory
from common.process_entry import Entry, entry
from deploy import cli
from deploy.children import Child
from deploy.process_table import ProcessRecord, Table, table_path, write_table


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a model and a draft model, as far as deploy/up looks at them; no process can be started."""

    def start(self: Child) -> None:
        raise OSError(errno.EAGAIN, f"{self.name} is started")

    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(Child, "start", start)
    with tempfile.TemporaryDirectory(prefix="td") as directory:
        (Path(directory) / "model").mkdir()
        (Path(directory) / "draft").mkdir()
        yield Path(directory)


def up(place: Path, model: str = "model", draft: str | None = None) -> tuple[int, str]:
    """Return the exit code of deploy/up and what it says after the name of the file."""
    file = place / "c.yaml"
    speculation = "" if draft is None else f"speculation: {{algorithm: eagle3, draft_model_path: {draft}}}\n"
    file.write_text(f"model: {{path: {model}}}\nprocess: {{run_dir: run}}\n{speculation}")
    result = CliRunner().invoke(cli.app, ["up", str(file)])
    return result.exit_code, result.stderr.removeprefix(f"{file}: ").strip()


def test_models_that_exist_are_started(place: Path) -> None:
    code, said = up(place, "model", "draft")
    assert (code, "router is started" in said) == (1, True)


def test_the_key_and_the_directory_that_is_missing_are_named(place: Path) -> None:
    code, said = up(place, "none/mine")
    assert code == 2
    assert said.startswith(f"model.path: {place}/none/mine does not exist: correct the path")
    assert up(place, "model", "gone") == (
        2,
        f"speculation.draft_model_path: {place}/gone does not exist: correct the path",
    )
    assert [path.name for path in (place / "run").iterdir()] == ["logs"]


def test_a_file_is_no_model(place: Path) -> None:
    (place / "a.safetensors").touch()
    assert up(place, str(place / "a.safetensors")) == (
        2,
        f"model.path: {place}/a.safetensors is a file: give the directory that contains it",
    )


@pytest.mark.parametrize("key", ["model.path", "speculation.draft_model_path"])
def test_a_name_of_the_hub_is_answered_with_what_downloads_it(place: Path, key: str) -> None:
    code, said = up(place, "acme/big") if key == "model.path" else up(place, draft="acme/big")
    assert (code, said) == (
        2,
        f"{key}: {place}/acme/big does not exist: correct the path, or for the model acme/big of the Hugging Face hub "
        "run `hf download acme/big --local-dir DIR` and write DIR",
    )


def test_a_directory_that_cannot_be_seen_is_named_with_the_reason(place: Path) -> None:
    """The user root may enter every directory, so a loop of links stands for all reasons."""
    (place / "loop").symlink_to("loop")
    code, said = up(place, str(place / "loop" / "mine"))
    assert (code, said) == (
        2,
        f"model.path: cannot read {place}/loop/mine: {os.strerror(errno.ELOOP)}; correct the path, or make it readable",
    )


def test_what_a_killed_supervisor_left_is_still_known_to_the_next_start(place: Path) -> None:
    """A start that has a model ends its processes; until then they run."""
    up(place)
    run_dir = run_directory(load_cluster(place / "c.yaml"))
    with subprocess.Popen(["sleep", "600"]) as left:
        record = entry(left.pid)
        table = Table(
            supervisor=Entry(pid=left.pid, started=0),
            cluster="c",
            url="http://127.0.0.1:9",
            state="ready",
            processes={"router": ProcessRecord(pid=record.pid, started=record.started)},
        )
        write_table(run_dir, table)
        code, _ = up(place, "none")
        assert (code, left.poll()) == (2, None)
        assert table_path(run_dir).exists()
        left.kill()
