"""For all tests: Triton's interpreter where there is no GPU, and the same examples and random numbers in every run.

The garbage collector leaves out what is made while tests are collected, and what a file of tests leaves to later ones.
"""

from __future__ import annotations

import gc
import logging
import os
import zlib
from collections.abc import Generator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.fakes import quick_interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is declared, so set first

# CI must give the same verdict every time, so examples are fixed; TANDEM_EXPLORE=1 looks for new counterexamples.
EXPLORE = "TANDEM_EXPLORE" in os.environ
settings.register_profile(
    "tandem",
    derandomize=not EXPLORE,
    deadline=None,  # no outcome may depend on how fast the machine is
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tandem")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Switch Python's garbage collector off while tests are collected, and exempt what was made from it.

    Nearly all of it lives as long as the process. Without this a third of the time to collect the tests, in each
    process, and a twentieth of the time to run them would be visits of these objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Exempt what a file leaves, too: modules that its tests imported, and what the end of a node has released.

    Also reset the log level, which tests of the start of a process have set.
    """
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        logging.getLogger("tandem").setLevel(logging.NOTSET)
        gc.collect()
        gc.freeze()
    return result


def seed(name: str) -> None:
    """Let torch's random numbers depend on the name of what draws them, and not on the tests that ran before it."""
    if EXPLORE:
        torch.seed()
    else:
        torch.manual_seed(zlib.crc32(name.encode()))


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    seed(f"{request.node.nodeid} {fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed(item.nodeid)


def pytest_collection_finish() -> None:
    """Act when the tests have imported what they use: Triton takes time, and not all tests need it."""
    quick_interpreter.install()
