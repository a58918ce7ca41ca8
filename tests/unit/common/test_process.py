"""What every process of a cluster sets for itself before it works."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness import ENV, MODEL

PROGRAM = """
import resource, sys
from pathlib import Path
from common.process import run_process
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
body = lambda resolved, reporter, log: print(resource.getrlimit(resource.RLIMIT_CORE))
run_process("router", Path(sys.argv[1]), sys.argv[2:], None, body)
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_crashes_write_no_core_dump_unless_that_is_configured(tmp_path: Path, allowed: bool) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f'model: {{path: "{MODEL}"}}\nprocess: {{run_dir: "{tmp_path}/r"}}\n')
    options = ["process.core_dumps=true"] if allowed else []
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file), *options],
        env=ENV,
        capture_output=True,
        text=True,
        check=True,
    )
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert done.stdout.strip() == (repr((most, most)) if allowed else "(0, 0)")
