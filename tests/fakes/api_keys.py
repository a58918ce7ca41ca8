"""API keys as a key file contains them, with their secrets."""

from __future__ import annotations

import hashlib
from typing import Any

from common.api_key import ApiKey


def api_key(secret: str, name: str, **fields: Any) -> ApiKey:
    return ApiKey(id=name, sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}
