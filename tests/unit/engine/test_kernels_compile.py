"""Every kernel compiles for an H200, and the largest users of shared memory also for GPUs with less of it.

The interpreter accepts much that the compiler, or the GPU, does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(1200)  # two busy cores
def test_every_kernel_compiles_for_an_h200_and_tiles_fit_other_gpus(tmp_path: Path) -> None:
    """8.9 represents GPUs with less shared memory. For 10.0 and 12.0 run tests/fakes/compile_for.py by hand."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # cached results would prove nothing
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # only debuggers read it
    environment["DISABLE_PTXAS_OPT"] = "1"  # a fifth of the time; what is checked is decided before
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.compile_for", "90", "89"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *launches, last = map(json.loads, done.stdout.splitlines())
    assert {each["kernel"] for each in launches if each["capability"] == 90} == set(last["kernels"])
    assert len(last["kernels"]) >= 20
    # Those whose last program adds up the parts of all.
    combined = {each["kernel"].rpartition(".")[2] for each in launches if each["combined"]}
    stepping = {"_decode_kernel", "_verify_kernel", "_rotary_decode_kernel"}
    assert combined == stepping | {"extend_kernel", "_hopper_extend_kernel"}
    # One for each size of heads: converted pages vary in number, and a compilation while serving takes seconds.
    hopper = [each["binary"] for each in launches if each["kernel"].endswith("._hopper_extend_kernel")]
    assert (len(hopper), len(set(hopper))) == (3, 2)
    # Triton stops loading keys ahead if it does not recognise the loop.
    over_keys = {*stepping, "extend_kernel"}
    assert all(each["ahead"] for each in launches if each["kernel"].rpartition(".")[2] in over_keys)
    fitted = {each["kernel"] for each in launches if each["capability"] == 89}
    assert len(fitted) >= 4
    (room,) = {each["limit"] for each in launches if each["capability"] == 89}
    # With less shared memory `_fp8_product_kernel` and `extend_kernel` do the work of these.
    only_here = {"fp8_gated._fp8_gated_kernel", "hopper_attention._hopper_extend_kernel"}
    large = {each["kernel"] for each in launches if each["shared"] > room}
    assert large <= fitted | {f"common.engine.ops.{name}" for name in only_here}
    for each in launches:
        assert each["shared"] <= each["limit"], each
        assert each["racing"] == [], each
        assert each["early"] == [], each
        assert each["late"] == [], each
        assert each["serialised"] == [], each
        if each["expected"] is not None:
            assert each["shared"] <= each["expected"] <= each["limit"], each
