"""GPUs are detected in a child process, and only if there is a driver."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deploy import gpus


def answering(monkeypatch: pytest.MonkeyPatch, said: str | Exception) -> None:
    def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(said, Exception):
            raise said
        return subprocess.CompletedProcess([], 0, stdout=said)

    monkeypatch.setattr(subprocess, "run", run)


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "driver_present", lambda: False)
    answering(monkeypatch, AssertionError("asked"))
    assert gpus.find_gpus() == []


def test_what_torch_says_is_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "driver_present", lambda: True)
    answering(monkeypatch, 'a warning\n[{"name": "NVIDIA L4", "total_bytes": 23}]\n')
    assert gpus.find_gpus() == [gpus.Gpu("NVIDIA L4", 23)]


@pytest.mark.parametrize(
    "failure", [subprocess.TimeoutExpired("python", 1), subprocess.CalledProcessError(1, "python"), "", "{}"]
)
def test_a_torch_that_fails_counts_as_no_gpus(
    monkeypatch: pytest.MonkeyPatch, failure: str | Exception
) -> None:
    monkeypatch.setattr(gpus, "driver_present", lambda: True)
    answering(monkeypatch, failure)
    assert gpus.find_gpus() == []


def test_torch_understands_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "driver_present", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.find_gpus() == []
    asked = subprocess.run(
        [sys.executable, "-c", gpus.QUESTION], capture_output=True, text=True, timeout=300, check=True
    )
    assert asked.stdout.strip() == "[]"
