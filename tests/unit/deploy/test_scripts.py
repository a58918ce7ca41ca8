"""The scripts of deploy/: which interpreter runs them; nothing is installed if one was named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    """A tree with only the scripts: `setup` reports that it ran, and interpreters report which one they are."""
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


def test_folders_that_the_shell_searches_for_cd_do_not_matter(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout.parent)
    assert _run(Path("deploy/down"), CDPATH=".")[0] == "installed"


def test_a_checkout_whose_path_divides_the_search_path_of_modules_is_refused(
    checkout: Path, tmp_path: Path
) -> None:
    """An interpreter that another checkout is installed in would run that one instead."""
    moved = checkout.parent.rename(tmp_path / "check:out")
    ran = subprocess.run(
        [moved / "deploy" / "up"],
        env={**os.environ, "TANDEM_PYTHON": str(tmp_path / "named")},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"{moved}: the path has a colon" in ran.stderr


def test_text_is_utf8_whatever_the_locale(checkout: Path, tmp_path: Path) -> None:
    """File names and output could not be encoded in an 8-bit locale, which LC_ALL=C with these variables stands for."""
    _script(
        tmp_path / "named",
        f'exec {sys.executable} -c "import sys; print(sys.getfilesystemencoding(), sys.stdout.encoding)"',
    )
    eight_bit = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = _run(checkout / "up", TANDEM_PYTHON=str(tmp_path / "named"), **eight_bit)
    assert said == ["utf-8 utf-8"]


def test_modules_in_the_current_directory_are_not_run(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project may have folders of the same names, or a file with the name of a module of Python."""
    (checkout / "__init__.py").touch()
    (checkout / "cli.py").write_text("import random; print('own', random.__name__)")
    project = tmp_path / "project"
    (project / "deploy").mkdir(parents=True)
    (project / "deploy" / "__init__.py").touch()
    (project / "deploy" / "cli.py").write_text("print('of the project')")
    (project / "random.py").write_text("print('of the project')")
    monkeypatch.chdir(project)
    assert _run(checkout / "up", TANDEM_PYTHON=sys.executable) == ["own random"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_standard_stream_is_closed(checkout: Path, tmp_path: Path, closed: str) -> None:
    """Otherwise a file or socket that the process opens gets the number, and log lines are written into it."""
    found = tmp_path / "found"
    _script(tmp_path / "named", f"readlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2 > {found}")
    ran = subprocess.run(
        ["bash", "-c", f'exec "$0" {closed}', checkout / "up"],
        env={**os.environ, "TANDEM_PYTHON": str(tmp_path / "named")},
        stdin=subprocess.PIPE,
        capture_output=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
    assert len(found.read_text().splitlines()) == 3


@pytest.mark.parametrize("there", [True, False])
def test_an_environment_of_another_checkout_is_not_changed(tmp_path: Path, there: bool) -> None:
    """In a worktree whose .venv is a link, an editable install would redirect the other checkout's imports.

    If that checkout no longer exists, for example because it was moved with its environment, setup runs as usual.
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
    (packages / "_editable_impl_tandem_serving.pth").write_text(f"{other}\n{other}")
    (deploy.parent / ".venv").symlink_to(environment)
    if there:
        other.mkdir()
    ran = subprocess.run([deploy / "setup"], capture_output=True, text=True, check=False, timeout=PATIENCE)
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


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(
    "script",
    ["setup", "check", "lock", "launch_router", "launch_prefill", "launch_decode", "launch_movable"],
)
def test_help_speaks_of_the_script_and_runs_nothing(tmp_path: Path, script: str, flag: str) -> None:
    """It runs in a copy that contains nothing else, so anything that ran would fail."""
    (tmp_path / "deploy").mkdir()
    shutil.copy2(DEPLOY / script, tmp_path / "deploy" / script)
    shown = subprocess.run(
        [tmp_path / "deploy" / script, flag], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert shown.stdout.startswith(f"usage: deploy/{script} ")
    assert shown.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["deploy"]


@pytest.mark.parametrize(
    ("flag", "module"),
    [
        *(("--help", each) for each in ("keygen", "eval_cli", "chat_cli", "convert")),
        *(("-h", each) for each in ("api_key", "bench_cli", "top_cli")),
    ],
)
def test_help_of_python_commands_speaks_of_the_script(module: str, flag: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", f"deploy.{module}", flag],
        cwd=DEPLOY.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert f"Usage: deploy/{module.removesuffix('_cli')} [OPTIONS]" in shown.stdout
    assert str(DEPLOY) not in shown.stdout, "a default is shown by its path in the checkout"


# -- deploy/setup ------------------------------------------------------------------------------------------------


FAILED_IMPORT = "echo Traceback; echo 'OSError: libgomp.so.1: cannot open shared object file'"


class Fresh:
    """A checkout without .venv, on a PATH with one Python and optionally uv; both only record their arguments."""

    def __init__(self, tmp_path: Path, uv: bool, answers: bool, loads: bool = True) -> None:
        """`answers`: the index of CPU builds does; `loads`: torch can be imported."""
        self.root, self.bin, self.asked = tmp_path / "checkout", tmp_path / "bin", tmp_path / "asked"
        self.unsafe = tmp_path / "unsafe"  # calls that take modules from the current directory
        (self.root / "deploy").mkdir(parents=True)
        shutil.copy2(DEPLOY / "setup", self.root / "deploy" / "setup")
        for name in ("pyproject.toml", "requirements.lock"):
            (self.root / name).touch()
        note = f'echo "$(basename "$0") $*" >> "{self.asked}"; [ "$PYTHONSAFEPATH" ] || echo "$*" >> "{self.unsafe}"'
        fake = f"""{note}
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "venv "*) mkdir -p "${{@: -1}}/bin"; cp "{self.bin}/python3.12" "${{@: -1}}/bin/python" ;;
    *urlopen*) exit {0 if answers else 1} ;;
    *"import torch") {"" if loads else f"({FAILED_IMPORT}) >&2; exit 1"} ;;
    *importlib.metadata*) echo 2.13.0+cpu ;;
esac"""
        _script(self.bin / "python3.12", fake)
        if uv:
            _script(self.bin / "uv", fake)

    def run(self, code: int = 0, **named: str) -> tuple[str, list[str]]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "UV_"))}
        path = f"{self.bin}:/usr/bin:/bin"
        ran = subprocess.run(
            [self.root / "deploy" / "setup"],
            env={**kept, "PATH": path, **named},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert ran.returncode == code, ran.stderr
        return ran.stderr, self.asked.read_text().splitlines() if self.asked.exists() else []


NO_GPU = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
    reason="this machine has an NVIDIA GPU",
)


def torch_line(asked: list[str]) -> str:
    return next(line for line in asked if "install" in line and line.endswith("torch==2.13.0"))


@NO_GPU
@pytest.mark.parametrize("uv", [False, True])
def test_without_a_gpu_the_cpu_build_is_taken_and_reported(tmp_path: Path, uv: bool) -> None:
    fresh = Fresh(tmp_path, uv, answers=True)
    said, asked = fresh.run()
    assert "no NVIDIA GPU here: torch is the CPU build from https://download.pytorch.org/whl/cpu" in said
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0" in torch_line(asked)
    assert torch_line(asked).startswith("uv pip install" if uv else "python -m pip install")
    assert (fresh.root / ".venv" / ".tandem").exists()
    fresh.asked.unlink()
    assert fresh.run() == ("", [])  # up to date


@pytest.mark.parametrize("uv", [False, True])
def test_what_the_program_imports_is_compiled_and_nothing_is_taken_from_the_current_directory(
    tmp_path: Path, uv: bool
) -> None:
    fresh = Fresh(tmp_path, uv, answers=True)
    _, asked = fresh.run(PYTHONDONTWRITEBYTECODE="1", PYTHONSAFEPATH="")
    assert asked[-1] == "python -c import decode_node.build, prefill_node.build, router.build"
    assert uv or all("--no-compile" in line for line in asked if "pip install" in line)
    assert not fresh.unsafe.exists()


def test_a_torch_that_cannot_be_imported_is_reported_with_the_remedy(tmp_path: Path) -> None:
    fresh = Fresh(tmp_path, uv=False, answers=True, loads=False)
    said, _ = fresh.run(code=2)
    assert "torch==2.13.0 cannot be imported: OSError: libgomp.so.1: cannot open shared object file; " in said
    assert f"remove {fresh.root}/.venv and name another build with TANDEM_TORCH or TANDEM_TORCH_INDEX" in said
    assert "Traceback" not in said
    assert not (fresh.root / ".venv" / ".tandem").exists()


def test_an_environment_without_pip_is_made_anew(tmp_path: Path) -> None:
    """A run that was interrupted leaves one."""
    fresh = Fresh(tmp_path, uv=False, answers=True)
    _script(fresh.root / ".venv" / "bin" / "python", "exit 1")
    _, asked = fresh.run()
    assert f"python3.12 -m venv {fresh.root}/.venv" in asked
    assert torch_line(asked).startswith("python -m pip install")


@NO_GPU
def test_without_an_answer_of_the_cpu_index_the_default_build_is_taken_and_reported(tmp_path: Path) -> None:
    said, asked = Fresh(tmp_path, uv=False, answers=False).run()
    assert "does not answer: torch is the default build" in said
    assert "--index-url" not in torch_line(asked)


@pytest.mark.parametrize("index", ["", "https://example.test/simple"])
def test_an_index_that_is_named_is_taken(tmp_path: Path, index: str) -> None:
    said, asked = Fresh(tmp_path, uv=False, answers=True).run(TANDEM_TORCH_INDEX=index)
    assert "NVIDIA" not in said
    assert ("--index-url" in torch_line(asked)) is bool(index)
    assert index in torch_line(asked)
