"""How many Python functions a prefill node calls around a prompt's forward: a count that other work does not change.

They run with cold caches, a microsecond or two each, while somebody waits for the first token (tests/bench/NOTES.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from common.messages.router_inbox import FirstToken
from tests.fakes.fake_link import FakeLink
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.scenarios import prompt_of

PROMPTS = 6
# With the links of this test, which do not call ZMQ: before the forward, and from its end to the first token.
MAX_BEFORE, MAX_AFTER = 230, 60


def calls_of_a_turn(cluster: NodeCluster) -> list[str]:
    """Return the functions that one turn of the prefill node calls, in order."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(
                f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno} {frame.f_code.co_qualname}"
            )

    sys.setprofile(note)
    try:
        cluster.prefill.node.loop.turn()
    finally:
        sys.setprofile(None)
    return calls


def index_of(calls: Sequence[str], name: str) -> int:
    return next(index for index, call in enumerate(calls) if call.endswith(f" {name}"))


def test_the_calls_before_and_after_the_forward_of_a_prompt_are_bounded() -> None:
    found: list[tuple[list[str], list[str]]] = []

    def run() -> None:
        with NodeCluster(Shape()) as cluster:
            for seed in range(PROMPTS):
                call = cluster.submit(prompt_of(16, seed), 3, legs="p")
                turn = calls_of_a_turn(cluster)
                (said,) = cluster.prefill.link.taken()
                assert isinstance(said, FirstToken)
                read, sent = (
                    index_of(turn, name) for name in ("LaunchedPrefill.read", f"{FakeLink.__name__}.send")
                )
                found.append((turn[: index_of(turn, "PrefillStep.launch")], turn[read:sent]))
                cluster.abort(call)
                cluster.settle()

    # In a thread: the profile of the test's own thread may belong to a tool that measures coverage.
    with ThreadPoolExecutor(1) as outside:
        outside.submit(run).result()
    before, after = (min(each, key=len) for each in zip(*found, strict=True))
    assert len(before) <= MAX_BEFORE, "\n".join(before)
    assert len(after) <= MAX_AFTER, "\n".join(after)
