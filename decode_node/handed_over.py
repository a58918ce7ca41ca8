"""Initializes a request from its handoff record."""

from __future__ import annotations

from common.engine.state.draft_row import DraftRow, DraftShape
from decode_node.request import DecodeRequest
from kv_transfer.events import Arrived


def take_record(
    request: DecodeRequest, arrived: Arrived, draft: DraftShape, vocab_size: int, now: float
) -> str | None:
    """Set the first token and the draft state of a request. Return the problem if the record does not fit, else None.

    `draft`: the required shape of the draft state.
    """
    record = arrived.record
    if record.first_token >= vocab_size:
        return f"the record's first token is {record.first_token}, of a vocabulary of {vocab_size}"
    if record.num_tokens != len(request.prompt):
        return "the record has another prompt length than the reservation"
    row = DraftRow(record.draft_topk_probs, record.draft_topk_ids, record.draft_hidden)
    if not row.fits(draft) or record.draft_hidden_dtype != draft.dtype_name:
        return "the record's draft state does not fit this node's draft model"
    request.draft = row
    request.output.append(record.first_token)
    request.launched = 1
    sent, seen = arrived.times
    # No record is sent before its pages are reserved. A time that says so comes from another clock, and tells nothing.
    request.drawn_at = sent if sent >= request.received + request.stages["reserved"] else seen
    request.mark("record_sent", request.drawn_at)
    request.mark("record_seen", seen)
    request.mark("record_accepted", now)
    return None
