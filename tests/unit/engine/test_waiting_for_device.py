"""The context in which GPU tests find operations that wait, without a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.fakes.waiting_for_device import waits_are_errors


def test_the_mode_ends_with_the_context_and_its_warning_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later tests of the process would fail at their first copy."""
    modes: list[str] = []

    def change(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("a prototype feature", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", change)
    with pytest.raises(RuntimeError, match="called a synchronizing"), waits_are_errors():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == ["error", "default"]
