"""The random numbers of a test are the same alone, after other tests and in each process of a run."""

from __future__ import annotations

import os

import pytest
import torch

fixed = pytest.mark.skipif("TANDEM_EXPLORE" in os.environ, reason="each run draws others")


@pytest.fixture(scope="module")
def drawn() -> float:
    torch.randn(3)
    return float(torch.randn(()))


@fixed
@pytest.mark.parametrize("value", [pytest.param(0.306922, id="first"), pytest.param(0.575298, id="second")])
def test_each_test_has_its_own(value: float, drawn: float) -> None:
    assert float(torch.randn(())) == pytest.approx(value, abs=1e-5)
    assert drawn == pytest.approx(-1.141380, abs=1e-5)
