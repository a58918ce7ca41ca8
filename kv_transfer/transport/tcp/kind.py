"""The record of `tcp`: any hosts, pools on CPUs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_transfer.transport.description import Description, Name


class TcpDescription(Description, frozen=True, tag="tcp"):
    """A listening socket. The key is for one peer and proves, by HMAC over a nonce, who connects."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
