"""The scripts of this folder fail if a part of them fails. These tests need no GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import expect

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = sorted(HERE.glob("*.sh"))


def run(body: str, tmp_path: Path) -> tuple[int, str]:
    """Return the exit code and output of a script that sources env.sh."""
    script = tmp_path / "script.sh"
    script.write_text(f'source "{HERE}/env.sh"\n{body}\n')
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("echo fine", 0, "fine"),
        ("false", 1, "FAILED, line 2: false"),
        ("false | tail -3\necho goes on", 1, "goes on"),
        ("part() { false; true; }\npart", 1, "FAILED"),
        ("value=$(false)\necho on", 1, "on"),
        ("echo $unset", 1, "unset"),
        ("exit 3", 3, ""),
        ("test 1 = 2 || echo other", 0, "other"),
    ],
)
def test_a_command_that_fails_makes_the_script_fail(body: str, code: int, said: str, tmp_path: Path) -> None:
    found, output = run(body, tmp_path)
    assert found == code, output
    assert said in output


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"level":"info","event":"error rate"}', 0),
        ('{"level":"warning","event":"slow"}', 0),
        ('{"level":"error","event":"lost"}', 1),
        ("Traceback (most recent call last):", 1),
    ],
)
def test_errors_in_the_logs_make_the_script_fail(line: str, code: int, tmp_path: Path) -> None:
    logs = tmp_path / "run/logs"
    logs.mkdir(parents=True)
    (logs / "node.log").write_text(f'{{"level":"info"}}\n{line}\n')
    found, output = run(f'no_errors "{tmp_path}/run"', tmp_path)
    assert found == code, output
    assert run(f'no_errors "{tmp_path}/nowhere"', tmp_path)[0] == 1, "logs that are missing are no success"


@pytest.mark.parametrize(
    "script", [each for each in SCRIPTS if each.name != "env.sh"], ids=lambda each: each.stem
)
def test_every_script_begins_with_env_and_is_bash(script: Path) -> None:
    text = script.read_text()
    first = next(line for line in text.splitlines() if line and not line.startswith("#"))
    assert first == 'source "$(dirname "${BASH_SOURCE[0]}")/env.sh"'
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set +" not in text


def total(replays: int, captured: int = 2, **fallbacks: int) -> dict[str, Any]:
    return {
        "phase": "decode",
        "model": "target",
        "replays": replays,
        "captured": captured,
        "fallbacks": fallbacks,
    }


def server_info(
    *totals: dict[str, Any], failed: dict[str, str] | None = None, role: str = "prefill"
) -> dict[str, Any]:
    graph = {"phase": "decode", "model": "target", "failed": failed or {}}
    return {
        "nodes": [
            {"name": f"{role}-0", "role": role, "graphs": [graph], "counters": {"graphs": list(totals)}}
        ],
        "internal_states": [{"avg_spec_accept_length": 2.0}],
    }


REPORT = {"score": 0.95, "right": 19, "count": 20, "errors": 0, "first_error": None}


@pytest.mark.parametrize(
    ("name", "content", "rest", "problem"),
    [
        ("score", REPORT, ["0.95"], None),
        ("score", REPORT, ["0.96"], "19 of 20 answers are right; at least 96% were expected"),
        ("score", {**REPORT, "errors": 1, "first_error": "x"}, ["0.5"], "1 of 20 questions failed"),
        ("replays", server_info(total(95, too_large=5)), [], None),
        (
            "replays",
            server_info(total(94, too_large=6)),
            [],
            "94 of 100 forwards of decode (target) replayed",
        ),
        ("replays", server_info(total(0, captured=0, no_graphs=9)), [], None),
        ("replays", server_info(failed={"8": "out of memory"}), [], "failed: {'8': 'out of memory'}"),
        ("replays", {"nodes": []}, [], "no node is registered"),
        ("accepts", server_info(), ["2.0"], None),
        ("accepts", server_info(), ["2.1"], "the accept length is 2.00"),
        ("tokens", {"usage": {"completion_tokens": 16}}, ["16"], None),
        ("tokens", {"error": {"message": "no"}}, ["16"], "None completion tokens; 16 were expected"),
        ("no_fallbacks", server_info(total(95)), [], None),
        ("no_fallbacks", server_info(total(0, captured=0, no_graphs=9)), [], None),
        (
            "no_fallbacks",
            server_info(total(0, captured=0, no_graphs=9), role="decode"),
            [],
            "decode-0: fallbacks of decode (target): {'no_graphs': 9}",
        ),
        (
            "no_fallbacks",
            server_info(total(99, too_large=1)),
            [],
            "fallbacks of decode (target): {'too_large': 1}",
        ),
        ("no_fallbacks", {"nodes": []}, [], "no node is registered"),
        ("score", {}, ["0.5"], "cannot be checked: KeyError('errors')"),
    ],
)
def test_expectations(
    name: str,
    content: dict[str, Any],
    rest: list[str],
    problem: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Row B12: headline.sh serves that load on a GPU, and fails by `score` and `no_fallbacks`."""
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(content))
    assert expect.main([name, str(file), *rest]) == (0 if problem is None else 1)
    assert (problem or "") in capsys.readouterr().out


@pytest.mark.parametrize(("share", "code"), [("0.42", 0), ("0.5", 0), ("0.51", 1)])
def test_first_tokens_with_and_without_graphs(
    share: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row B13: headline.sh measures both through HTTP on a GPU, and fails by this check."""
    files = tmp_path / "graphs.json", tmp_path / "eager.json"
    for file, median in zip(files, (9.0, 18.0), strict=True):
        file.write_text(json.dumps({"levels": [{"ttft_ms_p50": median}]}))
    assert expect.main(["sooner", str(files[0]), str(files[1]), share]) == code
    said = capsys.readouterr().out
    assert said == "" if code == 0 else "50% less; at least 51% less was expected" in said


def test_a_file_that_is_not_there_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert expect.main(["replays", str(tmp_path / "none.json")]) == 1
    assert "cannot be checked" in capsys.readouterr().out
