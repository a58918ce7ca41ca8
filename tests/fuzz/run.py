"""Run one fuzz target under atheris (coverage-guided), for as long as libFuzzer's options say.

    pip install atheris
    python -m tests.fuzz.run safetensors-header -max_total_time=60

Without a target it lists them. CI runs the same functions with hypothesis: tests/fuzz/test_targets.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

with atheris.instrument_imports(include=["common", "kv_transfer", "router", "json", "tests"]):
    from tests.fuzz import file_targets, http_targets, wire_targets

TARGETS = {**wire_targets.TARGETS, **file_targets.TARGETS, **http_targets.TARGETS}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit("name a target: " + ", ".join(TARGETS))
    target = TARGETS[sys.argv[1]]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[2:], corpus], target.run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
