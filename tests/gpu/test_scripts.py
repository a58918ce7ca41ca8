"""The scripts of this folder fail if a part of them fails. These tests need no GPU."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import expect, load_lines

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = sorted(HERE.glob("*.sh"))
SIDE_BY_SIDE = "decode_tier.sh", "movable.sh", "two_gpu_loads.sh"


def run(body: str, tmp_path: Path, **variables: str) -> tuple[int, str]:
    """Return the exit code and output of a script that sources env.sh, with `variables` in its environment."""
    script = tmp_path / "script.sh"
    script.write_text(f'source "{HERE}/env.sh"\n{body}\n')
    paths = {"OUT": str(tmp_path / "out"), "RUN": str(tmp_path / "run")}
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin"} | paths | variables
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


FAKE_PYTHON = """python3() { # keeps what it was called with, and writes what the checkpoint's writer would
    echo "${CUDA_VISIBLE_DEVICES:-all}: $*" >>"$out/calls"
    sleep 0.1
    case "$2" in *constructed) mkdir -p "$3" "$5" && touch "$3/config.json" "$5/config.json" ;; esac
}
export -f python3
timeout() { shift; "$@"; }
"""


def test_two_scripts_side_by_side_share_no_gpu_port_or_directory(tmp_path: Path) -> None:
    body = f"{FAKE_PYTHON}start_cluster plain 9 some.yaml --set a=b\necho $url"
    said = []
    for gpus, port in (("0 1", "8000"), ("2 3", "8100")):
        own = {"GPUS": gpus, "PORT": port, "RUN": f"{tmp_path}/{port}", "OUT": f"{tmp_path}/out-{port}"}
        code, output = run(body, tmp_path, **own)
        assert code == 0, output
        assert f"http://127.0.0.1:{port}" in output
        said.append((tmp_path / f"out-{port}/calls").read_text())
    for gpus, port, call in (("0,1", "8000", said[0]), ("2,3", "8100", said[1])):
        assert call.startswith(f"{gpus}: -m deploy.cli up some.yaml ")
        assert f"router.port={port} --set process.run_dir={tmp_path}/{port}/plain --set a=b --detach" in call


def test_the_checkpoint_is_written_once_by_scripts_that_begin_together(tmp_path: Path) -> None:
    """A directory that an interrupted writer left is not taken for the checkpoint."""
    (tmp_path / "m8b.part").mkdir()
    code, output = run(f"{FAKE_PYTHON}write_m8b & write_m8b\nwait $!", tmp_path, MODELS=str(tmp_path))
    assert code == 0, output
    assert len((tmp_path / "out/calls").read_text().splitlines()) == 1
    assert all((tmp_path / each / "config.json").exists() for each in ("m8b", "m8b-eagle3"))


@pytest.mark.parametrize("script", SIDE_BY_SIDE)
def test_scripts_that_run_side_by_side_name_no_port_and_no_directory_of_their_own(script: str) -> None:
    text = (HERE / script).read_text()
    assert "start_cluster" in text
    for shared in ("8000", "/tmp/run", "process.run_dir", "router.port"):
        assert shared not in text
    assert not re.search(r"[> ]/tmp/", text), "a file in /tmp that two scripts would share"


SUMMARY = {
    "ttft_ms_p50": 30.04,
    "ttft_ms_p99": None,
    "gap_ms_p50": 5.0,
    "gap_ms_p99": 9.0,
    "gap_ms_max": 21.0,
    "gaps_good": 0.853,
    "requests": 40,
    "failed": 0,
    "loop_lag_ms_max": 2.0,
}


def metrics(drafts: int, accepted: int) -> str:
    families = {load_lines.DRAFTS: drafts, load_lines.ACCEPTED: accepted}
    return "".join(
        f'# TYPE {name} counter\n{name}_total{{engine="decode-{index}"}} {value}\n'
        for name, value in families.items()
        for index in range(2)
    )


def test_a_rate_is_told_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "options": {"limits": {"gap": 0.015}},
        "loads": [{"load": "16/s", "summary": SUMMARY, "seeds": {"1": SUMMARY}}],
    }
    (tmp_path / "bench.json").write_text(json.dumps(report))
    for name, text in (("before", metrics(10, 10)), ("after", metrics(110, 160)), ("none", "")):
        (tmp_path / name).write_text(text)
    load_lines.main(["plain", *(str(tmp_path / each) for each in ("bench.json", "before", "after"))])
    figures = (
        "first token p50 / p99 30.0 / nan ms, gaps p50 / p99 / max 5.0 / 9.0 / 21.0 ms, "
        "every gap within the limit: 85.3 % of 40 requests, failed: 0, client late by at most 2.0 ms"
    )
    assert capsys.readouterr().out.splitlines() == [
        f"plain 16/s seed 1: {figures}",
        f"plain 16/s all seeds: {figures} (15 ms), accept length 2.50",
    ]
    load_lines.main(["plain", *(str(tmp_path / each) for each in ("bench.json", "none", "none"))])
    assert "accept length" not in capsys.readouterr().out


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
