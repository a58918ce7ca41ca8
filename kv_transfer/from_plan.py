"""Builds the transfer limits from the node's plan, so that both ends of a transfer use equal limits."""

from __future__ import annotations

from common.node_plan import NodePlan
from kv_transfer.handoff_record import record_bytes
from kv_transfer.limits import TransferLimits


def transfer_limits(
    plan: NodePlan, max_model_len: int, draft_topk: int = 0, hidden_bytes: int = 0
) -> TransferLimits:
    """Return the limits. `max_model_len` bounds the pages of one request and, with its draft state, its record."""
    transfer, pages = plan.transfer, -(-max_model_len // plan.page_size)
    return TransferLimits(
        slots_timeout=transfer.slots_timeout,
        first_page_timeout=transfer.first_page_timeout,
        stall_timeout=transfer.stall_timeout,
        record_bytes=record_bytes(pages, draft_topk, hidden_bytes),
        verify_checksums=transfer.verify_checksums,
    )
