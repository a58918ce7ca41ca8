"""Under random arrivals, aborts, damage, losses and interleavings all requests end and nothing leaks.

Requests that survive get the right tokens. TANDEM_EXPLORE=1 runs more seeds.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from common.node.completion import Deferred, Immediate
from kv_transfer.limits import TransferLimits
from tests.fakes.late_host import late_lanes
from tests.fakes.loopback import Damage, Fault
from tests.fakes.node_cluster import (
    RETRYABLE,
    Call,
    DecodeSide,
    HostShape,
    NodeCluster,
    PrefillSide,
    Shape,
    Watched,
)
from tests.fakes.sampling_cases import EVERYTHING
from tests.fakes.scenarios import prompt_of
from tests.fakes.tiny_model import VOCAB, reference

TRANSFER = TransferLimits(record_bytes=8192, slots_timeout=3.0, first_page_timeout=3.0, stall_timeout=1.0)
STEMS = [prompt_of(n, 100 + n) for n in (3, 9, 16, 24)]
HOST = HostShape(blocks=24, lanes=late_lanes)
SEEDS = range(100 if "TANDEM_EXPLORE" in os.environ else 8)
DAMAGES: list[Damage] = ["drop", "fail", "truncate", "corrupt", "duplicate", "stick"]


def shape_of(rng: random.Random) -> Shape:
    page_size = rng.choice((1, 4, 16))
    return Shape(
        page_size=page_size,
        chunk_tokens=rng.choice((5, 16, 64)),
        prefill_pool=rng.choice((64, 128, 512)),
        decode_pool=rng.choice((80, 128, 256)),
        prefill_batch=rng.choice((1, 2, 8)),
        max_running=rng.choice((1, 3, 8)),
        max_transferring=rng.choice((1, 3, 8)),
        reserved_tokens=rng.choice((0, 4, 16)),
        skip_ahead=rng.choice((0, 2, 8)),
        backup_bytes=rng.choice((0, 4096, 1 << 20)),
        prefill_cache=rng.random() < 0.7,
        decode_cache=rng.random() < 0.7,
        completion=rng.choice((Immediate, Deferred, Watched)),
        prefills=rng.choice((1, 2)),
        decodes=rng.choice((1, 2)),
        fencing=rng.random() < 0.5,
        transfer=TRANSFER,
        decode_host=rng.choice((None, HOST)),
        host=rng.choice((None, HOST)),
    )


def sampling_of(rng: random.Random) -> dict[str, Any]:
    stops = tuple(rng.choices(range(VOCAB), k=rng.choice((0, 0, 1, 3))))
    if rng.random() < 0.4:
        return {"stop_token_ids": stops}
    if rng.random() < 0.5:
        return {**EVERYTHING, "temperature": rng.choice((0.0, 0.9)), "min_tokens": rng.choice((0, 3, 12))}
    top_k, top_p = rng.choice((0, 8)), rng.choice((1.0, 0.8))
    return {
        "temperature": 0.9,
        "top_k": top_k,
        "top_p": top_p,
        "seed": rng.choice((1, 2)),
        "stop_token_ids": stops,
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_soak(seed: int) -> None:
    rng = random.Random(seed)
    shape = shape_of(rng)
    chaos = seed % 3 > 0  # every third run is undisturbed: nothing may fail and nothing may be placed twice
    with NodeCluster(shape) as cluster:
        _disturb(cluster, rng, chaos)
        for _ in range(rng.choice((40, 120))):
            _arrivals(cluster, rng, chaos)
            sides: list[PrefillSide | DecodeSide] = [*cluster.prefills, *cluster.decodes]
            for side in rng.sample(sides, k=rng.randint(0, 2)):
                cluster.turn_one(side)
        cluster.fabric.plan = lambda n: Fault()
        cluster.fabric.unstick()
        cluster.run(limit=6000, dt=0.002)
        for call in cluster.calls:
            if call.aborted:
                expected = reference(tuple(call.prompt), call.sampling)[0]
                assert call.ids == expected[: len(call.ids)]
            elif call.error is not None:
                assert chaos
                assert call.error.code == "deadline_exceeded", call.error
            else:
                assert (call.ids, call.finish) == reference(tuple(call.prompt), call.sampling)
        if not chaos:
            assert {failed.code for failed in cluster.failures} <= {"preempted"}
        assert {failed.code for failed in cluster.failures} <= {
            *RETRYABLE,
            "deadline_exceeded",
            "client_gone",
            "aborted",
        }
        cluster.clock.now += 40  # records of ended rooms expire
        cluster.settle(limit=2000)


def _disturb(cluster: NodeCluster, rng: random.Random, chaos: bool) -> None:
    def plan(n: int) -> Fault:
        delay = rng.choice((0, 0, 0, 0.003, 0.02))
        return Fault(delay, rng.choice(DAMAGES) if chaos and rng.random() < 0.05 else "none")

    cluster.fabric.plan = plan


def _arrivals(cluster: NodeCluster, rng: random.Random, chaos: bool) -> None:
    shape = cluster.shape
    waiting = [call for call in cluster.calls if not call.over]
    if rng.random() < 0.25 and len(waiting) < 10:
        prompt = rng.choice(STEMS) + prompt_of(rng.randint(0, 20), rng.randint(0, 3))
        most = min(shape.decode_pool, shape.prefill_pool) - len(prompt)
        prefill, decode = rng.randrange(shape.prefills), rng.randrange(shape.decodes)
        deadline = 0.05 if chaos and rng.random() < 0.05 else 1e6
        legs = rng.choice(("dp", "pd"))
        cluster.submit(
            prompt, rng.randint(1, min(most, 30)), prefill, decode, deadline, legs, **sampling_of(rng)
        )
    if chaos and waiting and rng.random() < 0.05:
        cluster.abort(rng.choice(waiting))
    if chaos and rng.random() < 0.02:
        cluster.lose(rng.choice([*cluster.prefills, *cluster.decodes]))  # declared lost although it lives


def test_a_hundred_requests_one_after_another_leave_nothing() -> None:
    """Over a long life, rooms, record slots, rows and tables of past requests do not accumulate."""
    rng = random.Random(5)
    with NodeCluster(Shape(page_size=4, decode_pool=128, max_running=3, max_transferring=2)) as cluster:
        calls: list[Call] = []
        for _ in range(100):
            calls.append(cluster.submit(rng.choice(STEMS), rng.randint(1, 6), seed=1, temperature=0.8))
            cluster.turn(2)
            if rng.random() < 0.2:
                cluster.abort(rng.choice([call for call in calls if not call.over] or [calls[-1]]))
        cluster.run()
        cluster.settle()
        assert not cluster.prefill.node.queues.ending
        assert sum(call.finish is not None for call in calls) > 50
