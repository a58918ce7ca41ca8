"""deploy/up MODEL: which file is written and started; a running cluster keeps its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config import load_cluster
from common.config.run_directory import run_directory
from common.errors import ConfigError
from common.process_entry import entry
from deploy import cli, prepare
from deploy.gpus import Gpu
from deploy.prepare import cluster_file_of
from deploy.process_table import Table, write_table
from deploy.supervisor import AlreadyRunning
from tests.architecture.source_tree import ROOT
from tests.fakes.descriptors import open_descriptors

MODELS = ROOT / "deploy" / "tiny_models"
RUNNER = CliRunner()
VARIABLE = "TANDEM_PROCESS_RUN_DIR"


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory with one model, and run directories with paths short enough for sockets."""
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(prepare, "find_gpus", list)
    with tempfile.TemporaryDirectory(prefix="td") as text:
        directory = Path(text)
        monkeypatch.setenv("XDG_RUNTIME_DIR", text)
        shutil.copytree(MODELS / "tiny-target", directory / "mine")
        monkeypatch.chdir(directory)
        yield directory
        monkeypatch.undo()


def run(
    text: str, draft: str | None = None, revision: str | None = None, overrides: tuple[str, ...] = ()
) -> tuple[Path, list[str]]:
    said: list[str] = []
    with prepare.prepare(text, draft, revision, overrides, said.append) as file:
        return file, said


def test_a_model_directory_gets_a_cluster_file(place: Path) -> None:
    file, said = run("mine")
    assert file == cluster_file_of(str(place / "mine"))
    loaded = load_cluster(file)
    assert (loaded.cluster.model.served_name, loaded.model_path) == ("mine", place / "mine")
    assert said[-1].startswith("serving mine on the CPU (")
    assert str(file) in said[-1]


def test_a_model_of_the_hub_is_looked_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def find(name: str, revision: str | None, say: object, check: object = None) -> Path:
        asked.append((name, revision))
        return place / "mine"

    monkeypatch.setattr(prepare, "find_snapshot", find)
    file, _ = run("acme/mine", revision="v2")
    loaded = load_cluster(file)
    assert (loaded.cluster.model.served_name, loaded.model_path) == ("acme/mine", place / "mine")
    assert file == cluster_file_of("acme/mine")
    run("mine", draft="acme/head")
    assert asked == [("acme/mine", "v2"), ("acme/head", None)]


def test_a_draft_directory_is_taken(place: Path) -> None:
    file, said = run("mine", draft=str(MODELS / "tiny-eagle3"))
    assert said[-1].startswith(f"serving mine with eagle3 drafts of {MODELS / 'tiny-eagle3'} on the CPU (")
    loaded = load_cluster(file)
    assert (loaded.cluster.speculation.algorithm, loaded.draft_path) == ("eagle3", MODELS / "tiny-eagle3")


@pytest.mark.parametrize("draft", ["none", "mine/config.json"])
def test_a_draft_that_is_none_is_refused(place: Path, draft: str) -> None:
    with pytest.raises(
        ConfigError, match="^--draft: [^;]*; use the directory of a draft model, or ORG/NAME$"
    ):
        run("mine", draft=draft)


def test_options_of_models_are_refused_for_files(place: Path) -> None:
    (place / "c.yaml").write_text("model: {path: mine}\n")
    assert run("c.yaml") == (Path("c.yaml"), [])
    with pytest.raises(ConfigError, match=r"--draft .*set speculation\.draft_model_path"):
        run("c.yaml", draft="head")
    with pytest.raises(ConfigError, match=r"--revision .*set model\.path"):
        run("c.yaml", revision="main")
    with pytest.raises(ConfigError, match="--revision applies only to ORG/NAME"):
        run("mine", revision="main")


def test_a_running_cluster_keeps_its_file(place: Path) -> None:
    """Its nodes read the file again when they are restarted."""
    file, _ = run("mine")
    before = file.read_text()
    table = Table(supervisor=entry(os.getpid()), cluster="c", url="http://x:1", state="ready", processes={})
    write_table(run_directory(load_cluster(file)), table)
    assert run("mine", draft=str(MODELS / "tiny-eagle3")) == (file, [])
    assert file.read_text() == before


def test_a_second_start_does_not_replace_the_file_of_the_first(place: Path) -> None:
    """Until the first cluster has a table, and also if it has a run directory of its own."""
    before = open_descriptors()
    with prepare.prepare("mine", None, None, (), lambda text: None) as file:
        written = file.read_text()
        for overrides in ((), ("process.run_dir=elsewhere",)):
            with pytest.raises(
                AlreadyRunning, match=rf"another deploy/up has written {file} .*deploy/up COPY"
            ):
                run("mine", draft=str(MODELS / "tiny-eagle3"), overrides=overrides)
        refused = RUNNER.invoke(cli.app, ["up", "mine", "--draft", str(MODELS / "tiny-eagle3")])
        assert (refused.exit_code, file.read_text()) == (1, written)
        assert "another deploy/up" in refused.stderr
    with pytest.raises(ConfigError, match="--draft"):
        run("mine", draft="none")  # a start that is refused leaves no lock
    run("mine", draft=str(MODELS / "tiny-eagle3"))
    assert file.read_text() != written
    assert open_descriptors() == before


def advised_options(refusal: AlreadyRunning) -> list[str]:
    """Return the arguments of the command that the refusal says to run."""
    found = re.search("stop that one with deploy/down (.*), or copy the file", str(refusal))
    assert found is not None, refusal
    return shlex.split(found[1])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("override", "default"),
        ("override", "environment"),
        ("override", "override"),
        ("environment", "default"),
        ("environment", "environment"),
        ("default", "environment"),
        ("default", "override"),
    ],
)
def test_how_to_stop_the_cluster_that_keeps_the_file_names_its_run_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    """The command works where the second start was refused, whatever the environment says there."""
    overrides = ("process.run_dir=its own",) if first == "override" else ()
    if first == "environment":
        monkeypatch.setenv(VARIABLE, str(place / "first"))
    with prepare.prepare("mine", None, None, overrides, lambda text: None) as file:
        running = Table(
            supervisor=entry(os.getpid()), cluster="c", url="http://x:1", state="ready", processes={}
        )
        write_table(run_directory(load_cluster(file, overrides)), running)
        monkeypatch.delenv(VARIABLE, raising=False)
        if second == "environment":
            monkeypatch.setenv(VARIABLE, str(place / "second"))
        with pytest.raises(AlreadyRunning) as caught:
            run("mine", overrides=("process.run_dir=elsewhere",) if second == "override" else ())
        options = advised_options(caught.value)
        assert options[0] == str(file)
        shown = RUNNER.invoke(cli.app, ["status", *options])
        assert shown.exit_code == 1, "it runs, but its router does not answer"


def test_a_second_start_while_the_first_prepares_the_file_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of an earlier start says nothing about the first one, and deploy/down cannot end it yet."""
    run("mine")
    refusals: list[str] = []

    def second() -> list[Gpu]:
        with pytest.raises(AlreadyRunning) as caught:
            run("mine")
        refusals.append(str(caught.value))
        return []

    monkeypatch.setattr(prepare, "find_gpus", second)
    run("mine")
    assert refusals == [
        f"another deploy/up prepares {cluster_file_of('mine')}; wait until its cluster has started, or end it with "
        "Ctrl-C in its terminal"
    ]


def test_a_detached_supervisor_keeps_the_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that started it has ended by then."""
    kept: list[int] = []

    def spawn(command: list[str], *, pass_fds: Sequence[int], **options: object) -> object:
        kept.extend(os.dup(each) for each in pass_fds)
        raise OSError("enough")

    monkeypatch.setattr(subprocess, "Popen", spawn)
    result = RUNNER.invoke(cli.app, ["up", "mine", "--detach"])
    assert isinstance(result.exception, OSError)
    with pytest.raises(AlreadyRunning, match="another deploy/up"):
        run("mine")
    for each in kept:
        os.close(each)
    run("mine")


def test_a_gpu_that_torch_cannot_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "driver_present", lambda: True)
    _, said = run("mine")
    assert any("this torch cannot use it: serving on the CPU" in line for line in said)


@pytest.mark.parametrize(("command", "code"), [("status", 3), ("down", 0), ("config", 3)])
@pytest.mark.parametrize("target", ["mine", "acme/mine"])
def test_a_model_that_was_never_started(command: str, code: int, target: str) -> None:
    result = RUNNER.invoke(cli.app, [command, target])
    assert result.exit_code == code
    assert f"not running: deploy/up {target} has not been run" in result.stderr


def test_what_up_wrote_is_found_by_the_other_commands(place: Path) -> None:
    run("mine")
    shown = RUNNER.invoke(cli.app, ["config", str(place / "mine")])
    assert shown.exit_code == 0
    assert str(place / "mine") in shown.stdout
    assert (
        RUNNER.invoke(cli.app, ["status", "mine"]).stderr.strip() == "not running; deploy/up mine starts it"
    )


@pytest.mark.parametrize("command", ["up", "down", "status", "config"])
def test_a_directory_that_is_no_model_is_one_sentence(place: Path, command: str) -> None:
    result = RUNNER.invoke(cli.app, [command, str(place)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{place}: the directory has no config.json, so it is not a model directory")


def test_the_port_is_one_option(place: Path) -> None:
    result = RUNNER.invoke(cli.app, ["up", "mine", "--port", "0"])
    assert result.exit_code == 2
    assert "router.port: deploy/up needs a fixed port" in result.stderr
