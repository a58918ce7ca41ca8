"""The receiving end of a rank's transfers: its endpoint, whose memory holds the pool, and the setup of its sockets."""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq
from torch import Tensor

from common.ipc import LinkSecurity
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.limits import TransferLimits
from kv_transfer.receiver import Receiver
from kv_transfer.transport.base import ReceiverEndpoint, Region
from kv_transfer.transport.cuda.pool_memory import as_storage


@dataclass(frozen=True, slots=True)
class ReceivingEnd:
    """The parts with which a rank receives pages into its own pool. Close it after everything that uses its sockets."""

    node: str  # the node's name
    incarnation: str  # the node's
    endpoint: ReceiverEndpoint
    limits: TransferLimits
    record_slots: int
    context: zmq.Context[zmq.Socket[bytes]]
    security: LinkSecurity

    def allocate(self, nbytes: int) -> Tensor:
        """Return the memory of the pool."""
        return as_storage(self.endpoint.allocate(Region.KV, nbytes))

    def receiver(self, layout: PoolLayout) -> Receiver:
        """Return the receiver of the rank whose pool has this layout."""
        return Receiver(
            self.incarnation,
            self.node,
            self.endpoint,
            layout,
            time.monotonic,
            self.limits,
            self.record_slots,
            checks_later=layout.tp_rank == 0,  # the others report rooms that are verified
        )

    def close(self) -> None:
        self.security.close()
        self.context.term()
