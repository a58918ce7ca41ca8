"""The search for products that a compiled kernel serialises."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.fakes.serialised_products import remarks

CLEAN = """ptxas info    : Compiling entry function '_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
"""
SERIALISED = "ptxas info    : (C7517) Potential Performance Loss: wgmma.mma_async instructions are serialized"
SPILLED = "    8 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads"


@pytest.mark.parametrize("wrong", [[], [SERIALISED], [SPILLED], [SERIALISED, SPILLED]])
def test_remarks(wrong: list[str]) -> None:
    assert remarks(CLEAN + "\n".join(wrong)) == wrong
