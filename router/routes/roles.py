"""Operator action of the admin listener: changes the role of a movable node."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from common.messages.identity import Role
from router.http.errors import json_response
from router.http.request_body import received
from router.nodes.role_changes import RoleChanges
from router.requests.json_body import decode_json


class RoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /workers/NAME/role."""

    role: Role
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # seconds; None: health.drain_timeout


_decoder = msgspec.json.Decoder(RoleRequest)


class RoleRoutes:
    """The handler. It answers once the node serves in its new role."""

    def __init__(self, changes: RoleChanges, name: str, drain_timeout: float) -> None:
        """
        Args:
            name: of this router's process.
            drain_timeout: seconds that the node's requests have to end, unless the body says otherwise.
        """
        self._changes = changes
        self._name = name
        self._drain_timeout = drain_timeout

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/workers/{name}/role", self.change)

    async def change(self, request: web.Request) -> web.Response:
        async with received(request) as memory:
            asked = decode_json(memory.take(), _decoder)
        seconds = self._drain_timeout if asked.timeout is None else asked.timeout
        changed = await self._changes.change(request.match_info["name"], asked.role, seconds, self._name)
        return json_response(changed)
