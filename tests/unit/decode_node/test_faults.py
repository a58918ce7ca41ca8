"""Faults between two real nodes: lost requests are answered, the others continue, nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from common.engine.forward.batch import ForwardBatch, ForwardOutput
from common.engine.state.pool import KvPool
from common.messages.node_inbox import Abort, PeerLost
from common.messages.router_inbox import Failed, FirstToken, Tokens
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from decode_node.graphs.decode_graph import DecodeGraphs
from decode_node.quarantine_wait import MAX_SECONDS
from decode_node.step import AutoregressiveStep, DecodeSteps
from kv_transfer.inbound import Inbound
from kv_transfer.messages import RecordWritten, Slots, encode
from prefill_node.forwards import Forwards
from prefill_node.request import PrefillRequest
from tests.fakes.loopback import Fault
from tests.fakes.node_cluster import NodeCluster, Parts, Shape, autoregressive
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of
from tests.fakes.tiny_model import PLACEMENT, VOCAB, reference

SMALL = Shape(page_size=4, chunk_tokens=8, decode_pool=160, reserved_tokens=4)


@pytest.mark.parametrize("damage", ["corrupt", "drop", "truncate", "fail", "duplicate"])
@pytest.mark.parametrize("write", range(4))
def test_a_damaged_write(damage: Any, write: int) -> None:
    """Pages 0-3 or the record are damaged once: the request is prefilled again, and its text does not differ."""
    with NodeCluster(SMALL) as cluster:
        cluster.fabric.plan = lambda n: Fault(damage=damage if n == write else "none")
        call = cluster.submit(prompt_of(30), 6, seed=1, **SAMPLED)
        cluster.run()
        expect_reference(call)
        assert call.attempts == (1 if damage == "duplicate" else 2)
        received = cluster.decode.link.counters
        told = received.transfer_failures + cluster.prefill.link.counters.transfer_failures
        assert told >= call.attempts - 1, (
            "whichever node says it first, the other one may be aborted by the router"
        )
        if damage in ("corrupt", "drop", "truncate"):
            assert received.checksum_failures + received.record_failures == 1
        cluster.settle()


WRONG_RECORDS: dict[str, dict[str, Any]] = {
    "another prompt length": {"num_tokens": 29},
    "a token that is not in the vocabulary": {"first_token": 1 << 40},
    "drafts where there is no draft model": {"draft_topk_probs": (0.5,), "draft_topk_ids": (1,)},
    "a hidden state where there is no draft model": {
        "draft_hidden": bytes(4),
        "draft_hidden_dtype": "float32",
    },
}


@pytest.mark.parametrize("wrong", WRONG_RECORDS.values(), ids=list(WRONG_RECORDS))
def test_a_whole_record_of_something_else_is_refused(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums cannot detect a prefill node that is wrong about the prompt or the draft."""
    record = PrefillRequest.record
    monkeypatch.setattr(
        PrefillRequest, "record", lambda request, dtype: structs.replace(record(request, dtype), **wrong)
    )
    with NodeCluster(SMALL, resubmit=False) as cluster:
        call = cluster.submit(prompt_of(30), 6)
        cluster.run()
        assert call.error is not None
        assert (call.error.code, len(call.ids)) == ("transfer_failed", 1)
        monkeypatch.undo()
        other = cluster.submit(prompt_of(30, 9), 6)
        cluster.run()
        expect_reference(other)
        cluster.settle()


WRONG_GRANTS: dict[str, Callable[[Slots], Slots]] = {
    "a page too few": lambda slots: structs.replace(slots, pages=slots.pages[:-1]),
    "a page too many": lambda slots: structs.replace(slots, pages=(*slots.pages, 39)),
    "more held pages than the prompt has": lambda slots: structs.replace(slots, pages=(), held_pages=9),
}


@pytest.mark.parametrize("wrong", WRONG_GRANTS.values(), ids=list(WRONG_GRANTS))
def test_a_grant_for_another_prompt_ends_its_request_only(
    wrong: Callable[[Slots], Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode node that is wrong about the prompt does not end the prefill nodes on which it is tried."""
    slots = Inbound.slots
    monkeypatch.setattr(Inbound, "slots", lambda inbound, now: wrong(slots(inbound, now)))
    with NodeCluster(SMALL, resubmit=False) as cluster:
        call = cluster.submit(prompt_of(30), 6)
        cluster.run()
        assert call.error is not None
        assert call.error.code == "transfer_failed"
        monkeypatch.undo()
        other = cluster.submit(prompt_of(30, 9), 6)
        cluster.run()
        expect_reference(other)
        cluster.settle()


@pytest.mark.parametrize("fencing", [False, True])
def test_a_write_that_hangs_is_given_up_and_its_pages_wait(fencing: bool) -> None:
    with NodeCluster(replace(SMALL, fencing=fencing), resubmit=False) as cluster:
        cluster.fabric.plan = lambda n: Fault(damage="stick" if n == 1 else "none")
        call = cluster.submit(prompt_of(30), 6)
        cluster.run(dt=0.5)
        assert call.error is not None
        assert call.error.code == "transfer_failed"
        cluster.turn(10)
        free_then = cluster.decode.space.leased_pages == 0
        assert free_then is fencing, "without a fence, pages that may still be written are not given away"
        assert (cluster.decode.link.load.quarantined_pages > 0) is not fencing
        other = cluster.submit(prompt_of(30, 9), 6)
        cluster.fabric.unstick()
        cluster.run()
        expect_reference(other)
        cluster.settle()


def test_a_prefill_node_dies_in_the_middle() -> None:
    """The decode node's transport sees the death at once, the router later."""
    with NodeCluster(replace(SMALL, prefills=2)) as cluster:
        cluster.fabric.plan = lambda n: Fault(delay=1e6 if n < 2 else 0)
        call = cluster.submit(prompt_of(30), 6)
        cluster.turn(4)
        cluster.kill(cluster.prefill)
        cluster.run()
        expect_reference(call)
        assert call.attempts == 2
        cluster.lose(cluster.prefill)
        again = cluster.submit(prompt_of(30), 6, prefill=1)
        cluster.run()
        expect_reference(again)
        cluster.settle()


@pytest.mark.parametrize("routers", ["all", "one"])
def test_a_record_that_a_prefill_node_has_sent_before_its_end_counts(
    routers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that drains ends right after its last record, and the router may say so before the record is read."""
    with NodeCluster(SMALL, resubmit=False) as cluster:
        call = cluster.submit(prompt_of(30), 6)
        cluster.run(
            until=lambda: any(
                each.state.value == "awaiting" for each in cluster.decode.receiver.rooms.parts()
            )
        )
        for _ in range(1000):
            cluster.turn_one(cluster.prefill)
            if not len(cluster.prefill.node.queues):
                break
        assert call.prefill_stages is not None, "the prefill node has not sent the record"
        assert len(cluster.decode.node.queues.transferring) == 1
        if routers == "one":
            monkeypatch.setattr("common.node.lost_peers.LostPeers.report", lambda *_: False)
        cluster.decode.link.deliver(PeerLost(incarnation=cluster.prefill.ref.incarnation))
        cluster.run()
        expect_reference(call)
        assert call.attempts == 1
        cluster.settle()


def test_a_prefill_node_that_was_declared_lost_but_lives() -> None:
    """Its pages stay in quarantine until it acknowledges the abort, over the existing connection."""
    with NodeCluster(SMALL, resubmit=False) as cluster:
        cluster.fabric.plan = lambda n: Fault(damage="stick" if n == 1 else "none")
        call = cluster.submit(prompt_of(30), 6)
        cluster.run(until=lambda: cluster.fabric.writes >= 2)
        cluster.turn(2)
        cluster.decode.link.deliver(PeerLost(incarnation=cluster.prefill.ref.incarnation))
        cluster.turn(3)
        assert call.error is not None
        assert call.error.code == "node_lost"
        assert cluster.decode.link.load.quarantined_pages == 8
        with pytest.MonkeyPatch.context() as patch:
            given: list[tuple[float, ...]] = []
            patch.setattr(cluster.decode.node.life, "end_turn", lambda *values: given.append(values))
            cluster.turn(1)
        assert given[-1][::2] == (0, 1), "no request waits for it, so the node may change its role"
        cluster.fabric.unstick()
        cluster.run(until=lambda: not len(cluster.decode.node.queues), limit=50)
        cluster.settle()
        # The same incarnation can be used again.
        later = cluster.submit(prompt_of(20), 6)
        cluster.run(limit=100)
        expect_reference(later)
        cluster.settle()


def test_a_prefill_node_that_answers_late_is_asked_again() -> None:
    """A stopped process does not answer Hello in time; once it answers, the pair is usable again."""
    with NodeCluster(SMALL, resubmit=False) as cluster:
        cluster.prefill.alive = False
        early = cluster.submit(prompt_of(5), 6)
        cluster.run(dt=0.5)
        assert early.error is not None
        assert early.error.code == "transfer_failed"
        cluster.prefill.alive = True
        cluster.prefill.link.deliver(Abort(room=early.room, reason="the request ended at the router"))
        cluster.turn(5)
        later = cluster.submit(prompt_of(20), 6)
        cluster.run(limit=100)
        assert later.error is None or later.error.code in ("transfer_failed", "node_lost"), (
            "a failure must allow another attempt"
        )
        again = cluster.submit(prompt_of(20), 6)
        cluster.run(limit=100)
        expect_reference(again)
        cluster.settle()


def test_reservations_that_wait_hear_of_a_lost_prefill_node() -> None:
    with NodeCluster(replace(SMALL, prefills=2, max_transferring=1), resubmit=False) as cluster:
        cluster.submit(prompt_of(30), 3, legs="d")  # its prompt never arrives
        waits = cluster.submit(prompt_of(30, 1), 3, prefill=1, legs="d")
        cluster.turn(3)
        cluster.decode.link.deliver(PeerLost(incarnation=cluster.prefills[1].ref.incarnation))
        cluster.turn(2)
        assert waits.error is not None
        assert waits.error.code == "node_lost"


def test_an_address_that_cannot_be_connected_to_fails_one_request() -> None:
    with NodeCluster(SMALL, resubmit=False) as cluster:
        good = cluster.prefill.ref
        cluster.prefill.ref = type(good)(
            name="prefill-x", role="prefill", incarnation="f" * 32, peer_address="carrier-pigeon://roof"
        )
        call = cluster.submit(prompt_of(5), 3)
        cluster.run(limit=20)
        assert call.error is not None
        cluster.prefill.ref = good
        other = cluster.submit(prompt_of(5), 3)
        cluster.run(limit=50)
        expect_reference(other)
        cluster.settle()


def test_the_decode_node_is_lost_for_the_prefill_node() -> None:
    with NodeCluster(replace(SMALL, decodes=2)) as cluster:
        calls = [cluster.submit(prompt_of(30, n), 6, seed=n, **SAMPLED) for n in range(4)]
        cluster.turn(3)
        cluster.kill(cluster.decode)
        cluster.lose(cluster.decode)
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


@pytest.mark.parametrize("busy", [False, True])
def test_a_decode_node_that_stood_still_greets_its_prefill_nodes_anew(busy: bool) -> None:
    """They were told that it is lost, and its next request must not be the one to discover that."""
    with NodeCluster(SMALL, resubmit=False) as cluster:
        cluster.submit(prompt_of(30), 3)
        cluster.run()
        if busy:
            cluster.submit(prompt_of(30, 1), 30)
            cluster.turn(4)
        cluster.prefill.link.deliver(PeerLost(incarnation=cluster.decode.ref.incarnation))
        cluster.turn(2)
        cluster.decode.link.router_lost = True
        cluster.turn(2)
        failed = len(cluster.failures)
        later = cluster.submit(prompt_of(30, 2), 6)
        cluster.run()
        expect_reference(later)
        assert cluster.failures[failed:] == []
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_a_request_that_ends_with_its_first_token(completion: type[Completion]) -> None:
    """Its reservation is released, whether it came before or after, and it never enters the batch."""
    prompt = prompt_of(11)
    eos = reference(tuple(prompt), _greedy(5))[0][0]
    for legs in ("dp", "pd", "p"):
        for max_tokens, stops in ((1, ()), (5, (eos,))):
            with NodeCluster(replace(SMALL, completion=completion)) as cluster:
                call = cluster.submit(prompt, max_tokens, stop_token_ids=stops, legs=legs[:1])
                cluster.turn(2)
                for leg in legs[1:]:
                    cluster.send_leg(call, leg)
                cluster.run()
                expect_reference(call)
                assert (call.ids, call.finish) == ([eos], "stop" if stops else "length")
                cluster.run(until=lambda cluster=cluster: not len(cluster.decode.node.queues), limit=50)  # type: ignore[misc]
                assert cluster.decode.link.counters.steps == 0
                assert not cluster.failures
                cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_stop_tokens_at_every_place(completion: type[Completion]) -> None:
    prompt = prompt_of(9)
    whole = reference(tuple(prompt), _greedy(12))[0]
    with NodeCluster(replace(SMALL, completion=completion)) as cluster:
        calls = [cluster.submit(prompt, 12, stop_token_ids=(whole[k], VOCAB + 5)) for k in range(12)]
        cluster.run()
        expect_reference(*calls)
        for k, call in enumerate(calls):
            assert call.ids == whole[: whole.index(whole[k]) + 1]
            assert call.finish == "stop"
        cluster.settle()


def _greedy(max_tokens: int) -> Any:
    from common.messages.generation import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


@pytest.mark.parametrize("completion", [Immediate, Deferred])
@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize("sampled", [False, True])
def test_logits_that_are_not_finite_end_one_request(
    where: str, sampled: bool, completion: type[Completion]
) -> None:
    options: dict[str, Any] = SAMPLED if sampled else {}
    poisoned: dict[str, Any] = (
        {"change_prompts": _poisoned_prompts} if where == "prefill" else {"step": _poisoned_decode}
    )
    with NodeCluster(replace(SMALL, completion=completion, **poisoned)) as cluster:
        bad = cluster.submit(prompt_of(9, 1), 12, seed=1, **options)
        others = [cluster.submit(prompt_of(9 + n, 2), 12, seed=n, **options) for n in range(3)]
        cluster.run()
        assert bad.error is not None
        assert bad.error == Failed(
            room=bad.room, code="internal_error", message="the model produced non-finite logits"
        )
        expect_reference(*others)
        cluster.settle()
        again = cluster.submit(prompt_of(9, 1), 12, seed=1, **options)  # nothing was kept that affects others
        cluster.run()
        expect_reference(again)
        cluster.settle()


@dataclass
class PoisonedPrompts:
    """A prompt forward that writes NaN for the first row that it draws, and into its KV, so that graphs read it too."""

    forwards: Forwards
    done: bool = False

    def __call__(self, batch: ForwardBatch, *embeds: Any) -> ForwardOutput:
        with torch.inference_mode():
            output = self.forwards.target.forward(batch, *embeds)
            if len(output.logits) and not self.done:
                self.done = True
                output.logits[0] = torch.nan
                _spoil(self.forwards.runner.pool, int(batch.kv_slots[batch.logits_rows[0]]))
        return output


@dataclass
class PoisonedDecode:
    """Decode graphs of which the fifth call finds NaN in the KV of its first row."""

    graphs: DecodeGraphs
    parts: Parts
    calls: int = 0

    def __call__(self, chosen: Tensor, sampling: Any) -> Any:
        self.calls += 1
        if self.calls == 5:
            pool, row = self.parts.runner.pool, int(chosen[0])
            last = int(self.parts.relay.seq_len[row]) - 1
            page = int(self.parts.table.pages[row, last // pool.page_size])
            _spoil(pool, page * pool.page_size + last % pool.page_size)  # the next forward reads it
        return self.graphs(chosen, sampling)


def _poisoned_prompts(forwards: Forwards) -> Forwards:
    poisoned: Any = PoisonedPrompts(forwards)
    return replace(forwards, target=replace(forwards.target, forward=poisoned))


def _poisoned_decode(parts: Parts) -> DecodeSteps:
    steps = autoregressive(parts)
    (graphs,) = steps.graphs
    poisoned: Any = PoisonedDecode(graphs.forward, parts)
    return replace(steps, by_width={0: AutoregressiveStep(poisoned, PLACEMENT.device, parts.completion)})


def _spoil(pool: KvPool, slot: int) -> None:
    with torch.inference_mode():
        for layer in range(pool.num_layers):
            pool.key(layer)[slot // pool.page_size, slot % pool.page_size] = torch.nan


# -- messages that cross, arrive late or are invalid


@pytest.mark.parametrize("order", ["before", "after", "alone"])
def test_an_abort_that_arrives_together_with_its_request(order: str) -> None:
    """Control messages come first, but an abort must not overtake the request that it is about."""
    with NodeCluster(SMALL) as cluster:
        call = cluster.submit(prompt_of(30), 60)
        cluster.abort(call)  # in the same drain on both nodes
        if order == "before":
            cluster.prefill.link.inbox.reverse()
            cluster.decode.link.inbox.reverse()
        elif order == "alone":
            cluster.decode.link.inbox.clear()
        cluster.turn(3)
        assert not len(cluster.prefill.node.queues)
        assert not len(cluster.decode.node.queues)
        assert not call.output
        cluster.settle()


def test_unknown_rooms_are_ignored() -> None:
    with NodeCluster(SMALL) as cluster:
        for side in (cluster.prefill, cluster.decode):
            side.link.deliver(Abort(room=99, reason="never heard of"), PeerLost(incarnation="e" * 32))
        cluster.turn(3)
        assert not cluster.failures
        cluster.settle()


def test_late_messages_are_not_counted_with_refused_ones() -> None:
    """Refused messages alert an operator; late ones occur whenever an abort and a transfer cross."""
    with NodeCluster(SMALL) as cluster:
        call = cluster.submit(prompt_of(30), 6)
        cluster.run()
        peer = cluster.prefill.ref.incarnation
        late = encode(RecordWritten(call.room, 1, 100), peer)
        cluster.decode.receiver.handle(peer, late)
        cluster.decode.receiver.handle(peer, late)
        cluster.decode.receiver.handle(peer, b"noise")
        cluster.turn(2)
        counters = cluster.decode.link.counters
        assert (counters.late_messages, counters.refused_messages) == (2, 1)
        counters = cluster.prefill.link.counters
        assert (counters.late_messages, counters.refused_messages) == (0, 0)


def test_each_node_reports_the_messages_that_its_sockets_have_refused() -> None:
    """Those to routers and those to nodes of the other role together."""
    with NodeCluster(SMALL) as cluster:
        for side, transfer in (
            (cluster.prefill, cluster.prefill.sender),
            (cluster.decode, cluster.decode.receiver),
        ):
            side.link.unsent_messages = 3
            transfer.counters.unsent = 2
        cluster.turn()
        for side in (cluster.prefill, cluster.decode):
            assert side.link.counters.unsent_messages == 5


def test_a_repeated_room_is_refused_and_the_first_continues() -> None:
    with NodeCluster(SMALL, resubmit=False) as cluster:
        call = cluster.submit(prompt_of(30), 6, legs="dpdp")
        call_by_room = cluster.by_room.pop(call.room)
        cluster.turn(1)
        refused = [f for f in cluster.failures if f.room == call.room]
        assert not refused or {f.code for f in refused} <= {"invalid_value"}
        cluster.by_room[call.room] = call_by_room
        cluster.abort(call)
        cluster.settle()


@pytest.mark.parametrize("tokens", [[VOCAB], [-1], [2**62], [5, 5, VOCAB + 7]])
def test_tokens_outside_of_the_vocabulary_are_refused(tokens: list[int]) -> None:
    with NodeCluster(SMALL, resubmit=False) as cluster:
        call = cluster.submit(tokens, 3)
        other = cluster.submit(prompt_of(7), 3)
        cluster.run()
        assert call.error is not None
        assert call.error.code == "invalid_value"
        expect_reference(other)
        cluster.settle()


def test_a_request_that_is_longer_than_the_model_allows() -> None:
    """The page table has room for max_model_len tokens: longer requests must not reach it."""
    with NodeCluster(replace(SMALL, max_len=64), resubmit=False) as cluster:
        too_long = cluster.submit(prompt_of(30), 60)
        cluster.run(limit=200)
        assert too_long.error is not None
        assert too_long.error.code == "invalid_value"
        fits = cluster.submit(prompt_of(30), 34)
        cluster.run()
        expect_reference(fits)
        cluster.settle()


def test_queues_are_bounded() -> None:
    with NodeCluster(
        replace(SMALL, max_queue=3, max_transferring=1, prefill_pool=32), resubmit=False
    ) as cluster:
        calls = [cluster.submit(prompt_of(30, n), 3) for n in range(12)]
        cluster.run()
        codes = {call.error.code for call in calls if call.error}
        assert codes == {"overloaded"}
        assert any(call.finish for call in calls)
        expect_reference(*(call for call in calls if call.finish))
        cluster.settle()


def test_draining_nodes_finish_what_they_have() -> None:
    with NodeCluster(SMALL, resubmit=False) as cluster:
        calls = [cluster.submit(prompt_of(20, n), 9) for n in range(3)]
        cluster.turn(2)
        cluster.prefill.node.life.drain()
        cluster.decode.node.life.drain()
        late = cluster.submit(prompt_of(5), 3)
        cluster.run()
        expect_reference(*calls)
        assert late.error is not None
        assert late.error.code == "node_lost", "the router may place it on another node"
        cluster.turn(3)
        assert cluster.prefill.link.state == cluster.decode.link.state == "draining"
        assert cluster.prefill.node.life.stopping()
        assert cluster.decode.node.life.stopping()
        cluster.settle()


def test_first_token_goes_out_before_the_transfer() -> None:
    with NodeCluster(SMALL) as cluster:
        cluster.fabric.plan = lambda n: Fault(delay=0.05)
        call = cluster.submit(prompt_of(30), 4)
        cluster.run()
        assert call.first_token_turn is not None
        assert call.done_turn is not None
        assert call.done_turn - call.first_token_turn > 30
        stages = list(call.prefill_stages or {})
        assert sorted(stages[:3]) == ["prefill_start", "queued", "slots"]
        assert stages[3:] == ["prefill_end", "last_page_sent", "record_sent"]
        assert list(call.decode_stages or {}) == [
            "reserved",
            "record_sent",
            "record_seen",
            "record_accepted",
            "decode_start",
            "step_started",
            "first_decode",
            "finished",
        ]
        cluster.settle()


def test_a_prompt_and_a_reservation_that_wait_for_each_other() -> None:
    """The decode node let a smaller request pass, the prefill node did not: neither may hold what the other needs."""
    shape = replace(
        SMALL,
        prefill_pool=64,
        decode_pool=96,
        skip_ahead=4,
        reserved_tokens=0,
        decode_cache=False,
        prefill_cache=False,
    )
    with NodeCluster(shape, resubmit=False) as cluster:
        running = cluster.submit(prompt_of(40), 8)
        cluster.run(until=lambda: len(running.output) >= 2)
        large = cluster.submit(prompt_of(60), 8)  # fits on the prefill node, waits on the decode node
        small = cluster.submit(prompt_of(44), 8)  # passes on the decode node, waits on the prefill node
        cluster.run(limit=300)
        expect_reference(running, large, small)
        cluster.settle()


def test_the_prefill_leg_of_a_refused_reservation_is_stopped() -> None:
    with NodeCluster(replace(SMALL, decode_pool=32), resubmit=False) as cluster:
        call = cluster.submit(prompt_of(40), 8)
        cluster.run()
        assert call.error is not None
        assert call.error.code == "invalid_value"
        assert "lower max_tokens" in call.error.message
        cluster.settle()


def test_messages_of_a_refused_request_come_in_order() -> None:
    """The Failed message of a preempted request follows all its tokens: the retry continues what the client has."""
    shape = Shape(page_size=4, decode_pool=96, reserved_tokens=4, backup_bytes=0, completion=Deferred)
    with NodeCluster(shape, resubmit=False) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40) for n in range(4)]
        cluster.run()
        failed = [call for call in calls if call.error is not None]
        assert failed
        for call in failed:
            assert call.ids == reference(tuple(call.prompt), call.sampling)[0][: len(call.ids)]
        cluster.settle()
        assert not [m for m in cluster.decode.link.taken() if isinstance(m, Tokens | FirstToken)]


@pytest.mark.parametrize("waits", ["retracted", "waiting"])
def test_a_request_does_not_wait_for_a_quarantine_that_may_never_end(waits: str) -> None:
    """A stopped prefill process proves nothing."""
    shape = replace(SMALL, prefills=2, decode_pool=32, decode_cache=False)
    with NodeCluster(shape, resubmit=False) as cluster:
        call = cluster.submit(prompt_of(8, 1), 20, prefill=1) if waits == "retracted" else None
        if call is not None:
            cluster.run(until=lambda: len(cluster.decode.node.queues.running) == 1)
        stopped = cluster.prefills[0]
        cluster.submit(prompt_of(12), 3, legs="d")
        cluster.turn(5)
        stopped.alive = False
        cluster.decode.link.deliver(PeerLost(incarnation=stopped.ref.incarnation))
        call = call or cluster.submit(prompt_of(24, 1), 5, prefill=1)
        queues = cluster.decode.node.queues
        cluster.run(until=lambda: bool(queues.retracted if waits == "retracted" else queues.waiting))
        assert len(queues.quarantined) == 1
        began = cluster.clock.now
        cluster.run(dt=0.1)
        assert call.error is not None
        assert call.error.code == "preempted"
        assert MAX_SECONDS < cluster.clock.now - began < MAX_SECONDS + 1.0
