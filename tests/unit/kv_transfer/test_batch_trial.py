"""A node copies in batches only if the runtime's call has brought back what it was given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.observability.logs import Log
from kv_transfer.transport.cuda.batch_copy import BatchCopy
from kv_transfer.transport.cuda.batch_trial import try_batches
from tests.fakes.fake_cuda import FakeCuda, FakeHost


def tried(cuda: FakeCuda) -> FakeCuda:
    try_batches(cast(Any, cuda), torch.device("cpu"), Log("host memory"))
    return cuda


def test_batches_that_work_are_used(caplog: pytest.LogCaptureFixture) -> None:
    cuda = tried(FakeCuda(FakeHost()))
    assert cuda.batches
    assert not caplog.records
    assert cuda.lanes[0].waited == 1, "the bytes were compared before they had come"
    assert cuda.lanes[0].events == [1], "the copies did not wait for the memory to be cleared"


@pytest.mark.parametrize("lost", [1, 3])
def test_batches_that_lose_bytes_are_not(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda(FakeHost())
    cuda.batches_lose = lost
    assert not tried(cuda).batches
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_batches_that_fail_are_not(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda(FakeHost())
    cuda.batch_fault = "cudaMemcpyBatchAsync: invalid argument (CUDA error 1)"
    assert not tried(cuda).batches
    assert cuda.lanes[0].waited == 1, "memory was freed while a copy might still use it"
    assert [vars(record)["fields"] for record in caplog.records] == [{"reason": cuda.batch_fault}]


def test_batches_that_do_not_come_back_are_not(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda(FakeHost())
    cuda.most_batches = 1
    assert not tried(cuda).batches
    assert cuda.lanes[0].waited == 1, "memory was freed while a copy might still use it"
    assert len(caplog.records) == 1


def test_a_runtime_without_batches_warns_nobody(caplog: pytest.LogCaptureFixture) -> None:
    cuda = FakeCuda(FakeHost())
    cuda.batches = False
    tried(cuda)
    assert not caplog.records


def test_refused_batches_are_not_started() -> None:
    batch = BatchCopy(SimpleNamespace(cudaMemcpyBatchAsync=pytest.fail), 13, lambda name, status: None)
    batch.refuse()
    none = torch.zeros(1, dtype=torch.int64).numpy()
    assert not batch.start(none, none, none, 1)
