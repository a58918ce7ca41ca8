"""The transfer's limits from the cluster file: equal on both ends by construction."""

from __future__ import annotations

from common.config import Cluster
from kv_transfer.handoff_record import record_bytes
from kv_transfer.limits import TransferLimits

MAX_LOGPROBS = 20  # top logprobs of the first token, as the API allows


def transfer_limits(
    cluster: Cluster, max_model_len: int, draft_topk: int = 0, hidden_bytes: int = 0
) -> TransferLimits:
    """`max_model_len` bounds the pages, and with them the record, of one request; so does its draft state."""
    section = cluster.transfer
    pages = -(-max_model_len // cluster.kv.page_size)
    return TransferLimits(
        slots_timeout=section.slots_timeout,
        first_page_timeout=section.first_page_timeout,
        stall_timeout=section.stall_timeout,
        record_bytes=record_bytes(pages, MAX_LOGPROBS, draft_topk, hidden_bytes),
        verify_checksums=section.verify_checksums,
    )
