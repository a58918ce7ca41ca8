"""The processes that produce training data: they deliver, they end, and replay does not hide their death."""

from __future__ import annotations

import multiprocessing
from typing import cast

import pytest

from deploy.tiny_models import tokenizer
from deploy.tiny_models.corpus import DocumentSource
from deploy.tiny_models.feeder import feed


def _children() -> list[multiprocessing.process.BaseProcess]:
    return list(multiprocessing.active_children())


def test_batches_arrive_and_the_workers_end_with_the_context() -> None:
    with feed(
        tokenizer.build(sample=500), seed=1, batch_tokens=512, workers=1, source=DocumentSource
    ) as batches:
        first = next(batches)
        assert first is not None
        assert first.ids.shape == first.weights.shape
        assert len(_children()) == 1
    assert _children() == []


def test_dead_workers_are_an_error() -> None:
    nonsense = cast(int, "many")
    feeding = feed(
        tokenizer.build(sample=500), seed=1, batch_tokens=nonsense, workers=1, source=DocumentSource
    )
    with feeding as batches, pytest.raises(RuntimeError, match="has died"):
        next(batches)
