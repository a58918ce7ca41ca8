"""Makes the endpoints of the transport that a record names; only the chosen transport is imported."""

from __future__ import annotations

from typing import Any

from common.named import named
from kv_transfer.transport.base import ReceiverEndpoint, ReceiverSetup, SenderEndpoint, SenderSetup


def make_sender(function: str, setup: SenderSetup[Any]) -> SenderEndpoint:
    """Make a prefill node's endpoint. `function` is TransportKind.sender.

    Raises ConfigError if this process cannot have one.
    """
    endpoint = named(function)(setup)
    assert isinstance(endpoint, SenderEndpoint)
    return endpoint


def make_receiver(function: str, setup: ReceiverSetup[Any]) -> ReceiverEndpoint:
    """Make a decode node's endpoint. `function` is TransportKind.receiver.

    Raises ConfigError if this process cannot have one.
    """
    endpoint = named(function)(setup)
    assert isinstance(endpoint, ReceiverEndpoint)
    return endpoint
